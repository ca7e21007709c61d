"""`Channel`: messages over a socket, each with its length before it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

LENGTH = struct.Struct("<q")
MAX_MESSAGE_BYTES = 1 << 32
RECEIVE_BYTES = 1 << 16
CUT_S = 4.0
"""After so long without an answer of the other host a connection counts as cut."""


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, line: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """No message may be longer than `max_bytes`."""
        self.line, self.max_bytes = line, max_bytes
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Raises `OSError` where the other end is gone."""
        with self._sending:
            self.line.sendall(LENGTH.pack(len(data)) + data)

    def read(self) -> bytes | None:
        """The next message; None once the other end is gone."""
        while True:
            message = self._next()
            if message is not None:
                return message
            if not self._receive():
                return None

    def peek(self) -> bytes | None:
        """The next message, which stays to be read."""
        message = self.read()
        if message is not None:
            self._buffer[:0] = LENGTH.pack(len(message)) + message
        return message

    def read_ready(self) -> list[bytes]:
        """All messages that are complete, where the socket has something to say; raises
        `EOFError` where the other end is gone."""
        if not self._receive():
            raise EOFError
        return self.read_buffered()

    def read_buffered(self) -> list[bytes]:
        """All messages that have been received already."""
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def is_closed(self) -> bool:
        """Whether the other end is gone, even if there is something left to read."""
        events = select.poll()
        events.register(self.line, select.POLLRDHUP)
        return bool(events.poll(0))

    def close(self) -> None:
        """Another thread that sends or reads here ends, too."""
        with contextlib.suppress(OSError):  # it is not connected any more
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()

    def _receive(self) -> bool:
        try:
            data = self.line.recv(RECEIVE_BYTES)
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def _next(self) -> bytes | None:
        if len(self._buffer) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._buffer)[0]
        if not 0 <= size <= self.max_bytes:
            raise OSError(f"a message of {size} bytes is announced")
        end = LENGTH.size + size
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return message


def notice_cut(line: socket.socket, timeout_s: float, *, is_read: bool = False) -> None:
    """Have the system end a TCP connection whose other end has not answered for so long.

    With something to send that holds only where the other end `is_read` all the time: a process
    that is too busy to read would count as cut off, too.
    """
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(int(timeout_s) - 1, 1))
    if is_read:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))
