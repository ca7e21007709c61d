"""Notices a process that lives but does nothing any more: one that hangs instead of dying."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

NUM_LOOKS = 8
"""A silence is made of so many shorter ones: a supervisor that was stopped itself for a while then
looks again before it blames the other."""


async def until_silent(ask: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
    """Return when what `ask` awaits has not come for `timeout_s`; never if that is 0. An engine
    answers between two steps, an API process between two turns of its loop, so that a step or a
    turn which never ends is noticed too."""
    if not timeout_s:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(timeout_s / NUM_LOOKS)
        if not await _answers(ask, timeout_s):
            return


async def _answers(ask: Callable[[], Awaitable[Any]], timeout_s: float) -> bool:
    answer = asyncio.ensure_future(ask())
    try:
        for _ in range(NUM_LOOKS):
            await asyncio.wait({answer}, timeout=timeout_s / NUM_LOOKS)
            if answer.done():
                return True
        return False
    finally:
        answer.cancel()
