"""How large bodies may be, each and together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from quire.protocol.errors import OverloadedError
from quire.server.http.limits import MAX_HELD_BODIES, BodyLimit, BodyMemory


@pytest.mark.parametrize(
    ("length", "refused"), [(b"100", False), (b"101", True), (b"", False), (b"-1", False)]
)
def test_bodies_that_say_they_are_too_large(length: bytes, refused: bool) -> None:
    assert BodyLimit(100).refuses({b"content-length": length}) == refused


@pytest.mark.parametrize(("sizes", "refused"), [([60, 40], False), ([60, 41], True)])
def test_bodies_that_turn_out_too_large(sizes: list[int], refused: bool) -> None:
    """Pieces are added up: a chunked body says nothing about its size."""

    async def read() -> None:
        messages = iter([{"type": "http.request", "body": bytes(size)} for size in sizes])

        async def receive() -> Any:
            return next(messages)

        bounded = BodyLimit(100).bounded(receive)
        for _ in sizes[:-1]:
            await bounded()
        if not refused:
            await bounded()
            return
        with pytest.raises(HTTPException, match="max_body_bytes=100") as too_large:
            await bounded()
        assert too_large.value.status_code == 413

    asyncio.run(read())


def test_bodies_beyond_what_memory_they_may_hold_are_refused() -> None:
    """The first may be as large as it likes: how large a body may be is checked elsewhere."""
    memory = BodyMemory(10)
    most = 10 * MAX_HELD_BODIES
    with memory.holding() as first, memory.holding() as second:
        first.add(bytes(most + 20))
        with pytest.raises(OverloadedError, match=f"{most + 20} bytes of request bodies"):
            second.add(b"x")
    with memory.holding() as third:
        third.add(bytes(most - 20))
        third.add(bytes(20))
        assert memory.num_bytes == third.num_bytes == most
    assert memory.num_bytes == 0
