"""What replies are written with: JSON however large, event streams, and work that ends when its
client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from quire.frontend.outputs import RequestOutput
from quire.protocol.errors import QuireError
from quire.server.http.errors import code_of, error_body, status_of

T = TypeVar("T")

CLIENT_LEFT = 499
"""The status of a reply whose client has left."""
LARGE_REPLY = 2000
"""Values from which a reply is written on a thread; fewer take a few milliseconds."""
PIECE = 64
"""Elements of a list that are encoded at once: a thread that encodes holds Python's lock."""
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def printable(text: str) -> str:
    """A client's text as a reply can repeat it: JSON may hold half a character, UTF-8 may not."""
    return text.encode("utf-8", "replace").decode()


def printable_data(value: Any) -> Any:
    """The same for JSON data."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_data(item) for key, item in value.items()}
    return [printable_data(item) for item in value] if isinstance(value, list) else value


def num_values(outputs: Iterable[RequestOutput]) -> int:
    """About how many values a reply to these holds."""
    count = 0
    for output in outputs:
        for one in output.outputs:
            width = len(one.logprobs[0]) if one.logprobs else 0
            count += 10 + len(one.token_ids) * width
        if output.prompt_logprobs is not None:
            count += 20 * len(output.prompt_logprobs)
    return count


async def off_loop(size: int, function: Callable[[], T]) -> T:
    """Call it here if there are few values, on a thread if there are many."""
    return function() if size < LARGE_REPLY else await asyncio.to_thread(function)


def encoded(value: Any) -> bytes:
    """As JSON, long lists in pieces."""
    if isinstance(value, dict) and any(isinstance(one, list | dict) for one in value.values()):
        pairs = [encode(str(key)) + b":" + encoded(one) for key, one in value.items()]
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list) and len(value) <= PIECE and value and isinstance(value[0], dict):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    if not isinstance(value, list) or len(value) <= PIECE:
        return encode(value)
    parts = (value[start : start + PIECE] for start in range(0, len(value), PIECE))
    return b"[" + b",".join(encode(part)[1:-1] for part in parts) + b"]"


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """What `work` returns, or None if the client goes away first, which cancels it."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: QuireError) -> bytes:
    body = error_body(status_of(error), str(error), code=code_of(error))
    return b"data: %b\n\n" % encode(body)


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
