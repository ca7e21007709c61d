"""`OrderWriter`, `OrderReader`: a stream of messages from one process to several others of its
host, written once into memory that they share."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np

CAPACITY = 1 << 24
HEADER_BYTES = 4096
"""Numbers of bytes: written by the writer, and read by each reader."""
MAX_READERS = HEADER_BYTES // 8 - 1
POLL_S = 0.0005
LENGTH = struct.Struct("<q")


class _Ring:
    """The memory: what was written last, up to `CAPACITY` bytes of it, over and over."""

    def __init__(self, fd: int) -> None:
        memory = mmap.mmap(fd, HEADER_BYTES + CAPACITY)
        self.written = np.frombuffer(memory, np.int64, 1)
        self.read = np.frombuffer(memory, np.int64, MAX_READERS, 8)
        self._data = memoryview(memory)[HEADER_BYTES:]

    def put(self, position: int, data: memoryview) -> None:
        start = position % CAPACITY
        first = min(len(data), CAPACITY - start)
        self._data[start : start + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def get(self, position: int, size: int) -> bytes:
        start = position % CAPACITY
        first = min(size, CAPACITY - start)
        return bytes(self._data[start : start + first]) + bytes(self._data[: size - first])


def new_ring() -> int:
    """A file for it, without a name, that processes inherit."""
    fd = os.memfd_create("quire-orders")
    os.ftruncate(fd, HEADER_BYTES + CAPACITY)
    return fd


class OrderWriter:
    def __init__(self, fd: int, bells: Sequence[socket.socket]) -> None:
        """`bells` wake the readers."""
        self._ring, self._bells = _Ring(fd), bells
        self._readers = self._ring.read[: len(bells)]

    def write(self, message: bytes, deadline: float) -> None:
        """Raises `TimeoutError` where a reader leaves no room until then."""
        data = memoryview(LENGTH.pack(len(message)) + message)
        while data:
            position = int(self._ring.written[0])
            room = CAPACITY - (position - int(self._readers.min()))
            if room == 0:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
                continue
            some, data = data[:room], data[room:]
            self._ring.put(position, some)
            self._ring.written[0] = position + len(some)
            self._ring_bells()

    def _ring_bells(self) -> None:
        for bell in self._bells:
            try:
                bell.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass  # it has been rung often enough
            except OSError:
                pass  # its reader is gone, which is told by its answers' end


class OrderReader:
    def __init__(self, fd: int, rank: int, bell: socket.socket) -> None:
        self._ring, self._rank, self._bell = _Ring(fd), rank, bell

    def read(self) -> bytes | None:
        """The next message; None once the writer is gone."""
        head = self._take(LENGTH.size)
        return None if head is None else self._take(LENGTH.unpack(head)[0])

    def _take(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            position = int(self._ring.read[self._rank])
            there = int(self._ring.written[0]) - position
            if there == 0:
                if not self._bell.recv(4096):
                    return None
                continue
            some = min(size, there)
            parts.append(self._ring.get(position, some))
            self._ring.read[self._rank] = position + some
            size -= some
        return parts[0] if len(parts) == 1 else b"".join(parts)
