"""`BoundedConnection`: a connection whose client can neither fill memory nor hold it for ever.

uvicorn takes any class of connections, but documents none to build on. Its options bound neither
the size of a head nor the time for it with the parser that is used here, and an application is
called only once the head is complete. Of uvicorn's own state this reads `cycle`, `pipeline`, `loop`
and `transport`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request line with headers, or of anything else that is not body."""
PIECE_BYTES = 64 << 10
"""So much of a request must come within the timeout, or all of it if it is shorter."""


class BoundedConnection(HttpToolsProtocol):
    """Closed when its client takes longer than `timeout_s` to send a piece of a request or to take
    up more of a reply. Idle connections between requests are uvicorn's to close."""

    timeout_s: float

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._slow: asyncio.TimerHandle | None = None
        """Runs while a request is awaited or on its way."""
        self._stalled: asyncio.TimerHandle | None = None
        """Runs while the client takes up nothing."""
        self._num_piece_bytes = 0
        self._num_head_bytes = 0
        self._is_in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_piece()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    # --- requests ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._num_piece_bytes += len(data)
        self._num_head_bytes += len(data)
        if self._slow is None or self._num_piece_bytes > PIECE_BYTES:
            self._await_piece()
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:  # headers after a body say nothing that is wanted here
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._is_in_body = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        super().on_message_complete()

    def _await_piece(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
        self._num_piece_bytes = 0
        self._slow = self.loop.call_later(self.timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        cycle = self.cycle
        is_answering = cycle is not None and not (cycle.more_body or cycle.response_complete)
        if is_answering or self.pipeline:
            self._await_piece()  # what comes now belongs to the next request, which has time
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close. A client whose request has not begun to be answered is told why."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        lacks_body = is_open and cycle.more_body and not cycle.response_started
        if lacks_body or (self._num_head_bytes and not is_open):
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self.transport.close()

    # --- replies ----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cancel_timers(self) -> None:
        for timer in (self._slow, self._stalled):
            if timer is not None:
                timer.cancel()


def bounded_connections(timeout_s: float) -> type[BoundedConnection]:
    """The class of connections with this timeout, as uvicorn wants it."""
    return type("Connection", (BoundedConnection,), {"timeout_s": timeout_s})
