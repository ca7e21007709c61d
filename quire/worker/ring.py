"""`OrderWriter`, `OrderReader`: a stream of messages from one process to several others of its
host, written once into memory that they share."""

from __future__ import annotations

import mmap
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np

from quire.kernels import cpu
from quire.kernels.cpu.library import native
from quire.protocol.errors import OptionError

CAPACITY = 1 << 24
COUNT_BYTES = 64
"""A cache line for each."""
MAX_READERS = 1023
HEADER_BYTES = (1 + MAX_READERS) * COUNT_BYTES
"""Numbers of bytes: written by the writer, and read by each reader."""
POLL_S = 0.0005
LENGTH = struct.Struct("<q")
ORDERED_MACHINES = ("x86_64", "AMD64")
"""Other processors may show a process the count of bytes before the bytes, unless told not to."""


class _Count:
    """A number that one process counts up. Those that see it see what was written before."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._value = np.frombuffer(memory, np.int64, 1, index * COUNT_BYTES)
        self._address = self._value.ctypes.data
        self._library = native() if cpu.available()[0] else None

    def set(self, value: int) -> None:
        if self._library is not None:
            self._library.quire_publish(self._address, value)
        else:
            self._value[0] = value

    def get(self, unless: int = -1, awake_s: float = 0.0) -> int:
        """Waits a little, where it is still `unless`."""
        if self._library is not None:
            return int(self._library.quire_watch(self._address, unless, int(1e9 * awake_s)))
        return int(self._value[0])


class _Ring:
    """The memory: what was written last, up to `CAPACITY` bytes of it, over and over."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, HEADER_BYTES + CAPACITY)
        self.written = _Count(self._memory, 0)
        self._data = memoryview(self._memory)[HEADER_BYTES:]

    def read(self, reader: int) -> _Count:
        return _Count(self._memory, 1 + reader)

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
    has_library, reason = cpu.available()
    if platform.machine() not in ORDERED_MACHINES and not has_library:
        raise OptionError(
            f"ranks in processes of their own need the native library on {platform.machine()}: "
            f"{reason}."
        )
    fd = os.memfd_create("quire-orders")
    os.ftruncate(fd, HEADER_BYTES + CAPACITY)
    return fd


class ReadersLate(TimeoutError):
    """Some readers take nothing in."""

    def __init__(self, readers: list[int]) -> None:
        super().__init__(f"readers {readers} take nothing in")
        self.readers = readers


class OrderWriter:
    def __init__(self, fd: int, wake_sockets: Sequence[socket.socket]) -> None:
        """A byte wakes a reader that sleeps."""
        self._ring, self._wake_sockets = _Ring(fd), wake_sockets
        self._readers = [self._ring.read(reader) for reader in range(len(wake_sockets))]
        self._position = 0
        self._is_closed = threading.Event()

    def write(self, message: bytes, deadline: float) -> None:
        """Raises `ReadersLate` where some leave no room until then, `OSError` once it is closed."""
        data = memoryview(LENGTH.pack(len(message)) + message)
        while data:
            read = [count.get() for count in self._readers]
            room = CAPACITY - (self._position - min(read))
            if room == 0:
                if time.monotonic() > deadline:
                    raise ReadersLate([i for i, count in enumerate(read) if count == min(read)])
                if self._is_closed.wait(POLL_S):
                    raise OSError("its orders have been closed")
                continue
            some, data = data[:room], data[room:]
            self._ring.put(self._position, some)
            self._position += len(some)
            self._ring.written.set(self._position)
            self._wake()

    def close(self) -> None:
        """Another thread that writes stops waiting for room."""
        self._is_closed.set()

    def _wake(self) -> None:
        for line in self._wake_sockets:
            try:
                line.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass  # there are enough bytes in it
            except OSError:
                pass  # its reader is gone, which is told by its answers' end


class OrderReader:
    def __init__(
        self, fd: int, rank: int, wake_socket: socket.socket, awake_s: float = 0.0
    ) -> None:
        """It looks for the next message for `awake_s` before it sleeps."""
        self._ring, self._wake_socket, self._awake_s = _Ring(fd), wake_socket, awake_s
        self._read, self._position = self._ring.read(rank), 0

    def read(self) -> bytes | None:
        """The next message; None once the writer is gone."""
        head = self._take(LENGTH.size)
        return None if head is None else self._take(LENGTH.unpack(head)[0])

    def _take(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            there = self._ring.written.get(self._position, self._awake_s) - self._position
            if there == 0:
                if not self._wake_socket.recv(4096):
                    return None
                continue
            some = min(size, there)
            parts.append(self._ring.get(self._position, some))
            self._position += some
            self._read.set(self._position)
            size -= some
        return parts[0] if len(parts) == 1 else b"".join(parts)
