"""Bounds of the queue: who must come back later, and when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quire.protocol.errors import OverloadedError
from quire.protocol.request import NewRequest

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

FULLEST = 2
MIN_RETRY_S, MAX_RETRY_S = 1, 600


def check_room_in_queue(scheduler: Scheduler, new: NewRequest) -> None:
    """Raise `OverloadedError` if the queue is full.

    Requests that find a free row when the next step is planned are not counted, and a prompt that
    is longer than the bound on tokens may wait if it waits alone. A tenant that has less than its
    share of the queue still gets in, until the queue is `FULLEST` times as long as its bound: who
    fills it keeps nobody else out.
    """
    limits, waiting = scheduler.limits, scheduler.waiting
    num_queued = waiting.num_new - len(scheduler.free_rows)
    if num_queued < 0:
        return
    own_requests, own_tokens = waiting.new_of(new.tenant)
    num_tenants = waiting.num_new_tenants + (own_requests == 0)

    def fits(total: int, own: int, more: int, bound: int) -> bool:
        if not bound or total + more <= bound:
            return True
        return total + more <= FULLEST * bound and own + more <= bound // num_tenants

    most = limits.max_num_queued_reqs
    if not fits(num_queued, own_requests, 1, most):
        raise _overloaded(
            scheduler,
            f"{waiting.num_new} requests are waiting, and max_num_queued_reqs={most} allows "
            "no more",
            "max_num_queued_reqs",
        )
    num_prompt, tokens = len(new.prompt_token_ids), waiting.num_new_tokens
    most = limits.max_num_queued_tokens
    if tokens and not fits(tokens, own_tokens, num_prompt, most):
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
