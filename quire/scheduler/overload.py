"""Bounds of the queue: who must come back later, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.protocol.errors import OverloadedError
from quire.protocol.request import NewRequest
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

FULLEST = 2
MIN_RETRY_S, MAX_RETRY_S = 1, 600
DISPLACED = "overloaded"
"""Why a request ended that had to make room for one of an older tenant."""


@dataclass(frozen=True)
class _Bound:
    """One of the two bounds of the queue, and what a new request would add."""

    setting: str
    limit: int
    total: int
    more: int
    part: int
    """Which of a tenant's two counts it is about: requests or prompt tokens."""

    def share(self, num_older: int) -> int:
        """What a tenant may have beyond the limit, with so many older ones beside it."""
        return self.limit // (num_older + 1)

    @property
    def is_kept(self) -> bool:
        return not self.limit or self.total + self.more <= self.limit

    @property
    def excess(self) -> int:
        """What must go before there is room for a tenant that is within its share."""
        return 0 if self.is_kept else max(0, self.total + self.more - FULLEST * self.limit)


def make_room_in_queue(scheduler: Scheduler, new: NewRequest) -> list[str]:
    """Ids of waiting requests that must end for `new` to wait; `OverloadedError` if it may not.

    Requests that find a free row when the next step is planned are not counted, and a prompt that
    is longer than the bound on tokens may wait if it waits alone. A tenant that has less than its
    share of the queue still gets in, until the queue is `FULLEST` times as long as its bound: who
    fills it keeps no other out. Shares count tenants that are as old or older, so new ones make
    no other's smaller; and where the queue is that long, requests of newer tenants that have more
    than their share make room.
    """
    limits, waiting, tenants = scheduler.limits, scheduler.waiting, scheduler.tenants
    num_queued = waiting.num_new - len(scheduler.free_rows)
    if num_queued < 0:
        return []
    tokens, num_prompt = waiting.num_new_tokens, len(new.prompt_token_ids)
    bounds = [_Bound("max_num_queued_reqs", limits.max_num_queued_reqs, num_queued, 1, 0)]
    if tokens:
        most = limits.max_num_queued_tokens
        bounds.append(_Bound("max_num_queued_tokens", most, tokens, num_prompt, 1))
    if all(bound.is_kept for bound in bounds):
        return []
    age, own = tenants.age(new.tenant), waiting.new_of.get(new.tenant, (0, 0))
    num_older = sum(tenants.age(name) < age for name in waiting.new_of)
    for bound in bounds:
        if not bound.is_kept and own[bound.part] + bound.more > bound.share(num_older):
            raise _overloaded(scheduler, new, bound.setting)
    displaced: list[str] = []
    excess = [bound.excess for bound in bounds]
    if any(excess):
        for request in _beyond_shares(scheduler, new.tenant, bounds):
            displaced.append(request.request_id)
            excess = [
                left - (1, request.num_prompt)[bound.part]
                for left, bound in zip(excess, bounds, strict=True)
            ]
            if max(excess) <= 0:
                break
        else:
            full = max(zip(excess, bounds, strict=True), key=lambda pair: pair[0])[1]
            raise _overloaded(scheduler, new, full.setting)
    return displaced


def _beyond_shares(scheduler: Scheduler, tenant: str, bounds: list[_Bound]) -> Iterator[Request]:
    """What tenants newer than this one have waiting beyond their shares; the newest tenant's
    first, and of each the last in rank first."""
    waiting, age = scheduler.waiting, scheduler.tenants.age
    names = sorted({*waiting.new_of, tenant}, key=age)
    requests: dict[str, list[Request]] = {name: [] for name in names}
    for request in waiting.new_requests():
        requests[request.new.tenant].append(request)
    for num_older in range(len(names) - 1, names.index(tenant), -1):
        name = names[num_older]
        counts = list(waiting.new_of[name])
        for request in sorted(requests[name], key=lambda one: one.rank, reverse=True):
            limited = [bound for bound in bounds if bound.limit]
            if all(counts[bound.part] <= bound.share(num_older) for bound in limited):
                break
            yield request
            counts[0] -= 1
            counts[1] -= request.num_prompt


def _overloaded(scheduler: Scheduler, new: NewRequest, setting: str) -> OverloadedError:
    limits, waiting = scheduler.limits, scheduler.waiting
    most, seconds = getattr(limits, setting), _seconds_to_half(scheduler)
    if setting == "max_num_queued_reqs":
        reason = f"{waiting.num_new} requests are waiting, and {setting}={most} allows no more"
    else:
        reason = (
            f"{waiting.num_new} requests with {waiting.num_new_tokens} prompt tokens are waiting, "
            f"and {setting}={most} leaves no room for {len(new.prompt_token_ids)} more"
        )
    return OverloadedError(
        f"the engine is overloaded: {reason}. Try again in about {seconds} s, or raise {setting}.",
        retry_after_s=seconds,
    )


def _seconds_to_half(scheduler: Scheduler) -> int:
    """When half of the queue should be gone: those sent away must not all find it full again."""
    rate = scheduler.pace.admitted_per_s
    seconds = scheduler.waiting.num_new_tokens / 2 / rate if rate else MIN_RETRY_S
    return math.ceil(min(max(seconds, MIN_RETRY_S), MAX_RETRY_S))
