"""JSON of replies, however large: what takes long leaves the event loop, and lets it run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from quire.frontend.outputs import RequestOutput

T = TypeVar("T")

LARGE_REPLY = 2000
"""Values from which a reply is written on a thread; fewer take a few milliseconds."""
PIECE = 64
"""Elements of a list that are encoded at once: a thread that encodes holds Python's lock."""


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
        pairs = [msgspec.json.encode(str(key)) + b":" + encoded(one) for key, one in value.items()]
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list) and len(value) <= PIECE and value and isinstance(value[0], dict):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    if not isinstance(value, list) or len(value) <= PIECE:
        return msgspec.json.encode(value)
    parts = (value[start : start + PIECE] for start in range(0, len(value), PIECE))
    return b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in parts) + b"]"
