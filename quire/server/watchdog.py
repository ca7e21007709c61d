"""Notices an engine that lives but does nothing any more: one that hangs instead of dying."""

from __future__ import annotations

import asyncio
from types import NoneType

from quire.frontend.engine_client import EngineClient

NUM_LOOKS = 8
"""A silence is made of so many shorter ones: a supervisor that was stopped itself for a while then
looks again before it blames the engine."""


async def until_silent(client: EngineClient, timeout_s: float) -> None:
    """Return when the engine has not answered for `timeout_s`; never if that is 0. It answers
    between two steps, so that a step which never ends is noticed too."""
    if not timeout_s:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(timeout_s / NUM_LOOKS)
        if not await _answers(client, timeout_s):
            return


async def _answers(client: EngineClient, timeout_s: float) -> bool:
    answer = asyncio.ensure_future(client.command("answer", NoneType))
    try:
        for _ in range(NUM_LOOKS):
            await asyncio.wait({answer}, timeout=timeout_s / NUM_LOOKS)
            if answer.done():
                return True
        return False
    finally:
        answer.cancel()
