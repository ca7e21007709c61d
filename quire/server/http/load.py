"""`Load`: how many requests the server is answering, all of its API processes together."""

from __future__ import annotations

import mmap
from pathlib import Path

from quire.server.http.middleware import Application, Receive, Scope, Send

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

    def change(self, number: int) -> None:
        self._counts[self._place] += number


class CountedRequests:
    """Counts POST requests between their arrival and the end of their replies."""

    def __init__(self, app: Application, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._load.change(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.change(-1)
