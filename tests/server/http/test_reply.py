"""Large replies are written off the event loop, in pieces that let it run; a stream whose client
leaves ends its work, however little of it was sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.server.http.reply import LARGE_REPLY, EventStream, encoded, num_values, off_loop

ENTRY = {7: Logprob(-0.5, 1, "a"), 8: Logprob(-1.5, 2, "b")}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"a": []},
        {"data": [{"index": i, "embedding": [0.5] * 100} for i in range(200)], "n": 1},
        {"choices": [{"prompt_logprobs": [None, *[ENTRY] * 300], "text": "é"}]},
        {"a": {1: {2: [3] * 65}}, "b": [[1, 2], {"c": None}]},
    ],
)
def test_pieces_make_the_same_json(value: Any) -> None:
    assert encoded(value) == msgspec.json.encode(value)


def test_what_is_large_runs_on_a_thread() -> None:
    async def threads() -> list[int]:
        return [await off_loop(size, threading.get_ident) for size in (1, LARGE_REPLY)]

    here, there = asyncio.run(threads())
    assert here == threading.get_ident() != there


def test_logprobs_make_replies_large() -> None:
    def output(num_tokens: int, **more: Any) -> RequestOutput:
        one = CompletionOutput(0, "", [7] * num_tokens, logprobs=[ENTRY] * num_tokens)
        return RequestOutput("id", None, [7], more.get("prompt_logprobs"), [one], True)

    assert num_values([output(10)]) < LARGE_REPLY <= num_values([output(1000)])
    assert num_values([output(1, prompt_logprobs=[None] * 200)]) >= LARGE_REPLY


def test_a_client_that_leaves_before_the_headers_are_sent() -> None:
    """They wait behind an earlier reply on the connection that the client does not read."""
    closed = []

    async def events() -> AsyncIterator[bytes]:
        raise AssertionError("no event was asked for")
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
