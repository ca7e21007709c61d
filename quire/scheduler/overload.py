"""Bounds of the queue: who must come back later, and when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quire.protocol.errors import OverloadedError
from quire.protocol.request import NewRequest

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

MIN_RETRY_S, MAX_RETRY_S = 1, 600


def check_room_in_queue(scheduler: Scheduler, new: NewRequest) -> None:
    """Raise `OverloadedError` if the queue is full.

    Requests that find a free row when the next step is planned are not counted, and a prompt that
    is longer than the bound on tokens may wait if it waits alone.
    """
    limits, waiting = scheduler.limits, scheduler.waiting
    num_queued = waiting.num_new - len(scheduler.free_rows)
    if num_queued < 0:
        return
    most = limits.max_num_queued_reqs
    if most and num_queued >= most:
        raise _overloaded(
            scheduler,
            f"{waiting.num_new} requests are waiting, and max_num_queued_reqs={most} allows "
            "no more",
            "max_num_queued_reqs",
        )
    num_prompt, tokens = len(new.prompt_token_ids), waiting.num_new_tokens
    most = limits.max_num_queued_tokens
    if most and tokens and tokens + num_prompt > most:
        raise _overloaded(
            scheduler,
            f"{waiting.num_new} requests with {tokens} prompt tokens are waiting, and "
            f"max_num_queued_tokens={most} leaves no room for {num_prompt} more",
            "max_num_queued_tokens",
        )


def _overloaded(scheduler: Scheduler, reason: str, setting: str) -> OverloadedError:
    seconds = _seconds_to_half(scheduler)
    return OverloadedError(
        f"the engine is overloaded: {reason}. Try again in about {seconds} s, or raise {setting}.",
        retry_after_s=seconds,
    )


def _seconds_to_half(scheduler: Scheduler) -> int:
    """When half of the queue should be gone: those sent away must not all find it full again."""
    rate = scheduler.pace.admitted_per_s
    seconds = scheduler.waiting.num_new_tokens / 2 / rate if rate else MIN_RETRY_S
    return math.ceil(min(max(seconds, MIN_RETRY_S), MAX_RETRY_S))
