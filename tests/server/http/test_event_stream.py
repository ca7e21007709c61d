"""A stream whose client leaves ends its work, however little of it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quire.server.http.event_stream import EventStream


def test_a_client_that_leaves_before_the_headers_are_sent() -> None:
    """They wait behind an earlier reply on the connection that the client does not read."""
    closed = []

    async def events() -> AsyncIterator[bytes]:
        raise AssertionError("nobody asked for an event")
        yield b""

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def leave() -> None:
        await EventStream(events(), lambda: closed.append(True))({}, receive, send)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert closed == [True]
