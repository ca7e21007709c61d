"""`EventStream`: a response of server-sent events that ends its work when the client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from quire.protocol.errors import QuireError
from quire.server.http.disconnect import unless_disconnected
from quire.server.http.errors import code_of, error_body, status_of

DONE = b"data: [DONE]\n\n"


def error_event(error: QuireError) -> bytes:
    body = error_body(status_of(error), str(error), code=code_of(error))
    return b"data: %b\n\n" % msgspec.json.encode(body)


class EventStream(Response):
    """Sends what `events` yields as it comes; an error in mid-stream becomes an event too.

    `close` is called at the end, also if a client left before the first event was asked for.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        last: bytes = DONE,
        write_error: Callable[[QuireError], bytes] = error_event,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._last = last
        self._write_error = write_error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except QuireError as error:
                data = self._write_error(error)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self._last, "more_body": False})
