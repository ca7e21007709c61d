"""`Load`: how many requests the server is answering, all of its API processes together."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

COUNT_BYTES = 8


class Load:
    """Counts of all API processes, one of which, at `place`, is this process's to write."""

    def __init__(self, counts: memoryview, place: int = 0) -> None:
        self._counts = counts.cast("q")
        self._place = place
        self._counts[place] = 0  # the process that had the place before is gone

    @classmethod
    def alone(cls) -> Load:
        """For an application that is served by one process."""
        return cls(memoryview(bytearray(COUNT_BYTES)))

    @classmethod
    def shared(cls, file: str, place: int) -> Load:
        with Path(file).open("r+b") as opened:
            return cls(memoryview(mmap.mmap(opened.fileno(), 0)), place)

    @staticmethod
    def make_file(file: str, num_processes: int) -> None:
        Path(file).write_bytes(bytes(COUNT_BYTES * num_processes))

    @property
    def num_requests(self) -> int:
        return sum(self._counts)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request between its arrival and the end of its reply."""
        self._counts[self._place] += 1
        try:
            yield
        finally:
            self._counts[self._place] -= 1
