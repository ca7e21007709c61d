"""Work for a client that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_LEFT = 499
"""The status of a reply whose client has left."""


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
