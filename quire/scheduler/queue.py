"""`WaitingQueue`: sequences without a row, in the order in which they get one.

Beside it `Tenants` says whose turn it is, `Pace` how quickly the queue moves, and `ProgressReports`
how far prompts have come and how long they will take.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Generic, TypeVar

import numpy as np

from quire.protocol.errors import OverloadedError
from quire.protocol.output import RequestProgress
from quire.protocol.plan import Int32Array, Int64Array
from quire.protocol.request import NewRequest
from quire.scheduler.sequence import SchedulerLimits, Sequence

RETURNING = -1
FULLEST = 2
MIN_RETRY_S, MAX_RETRY_S = 1, 600
MEMORY_S = 30.0
"""What lies this far back counts for a third of the pace."""
MAX_IDLE_TENANTS = 1024
MAX_KNOWN_TENANTS = 1024
PROGRESS_INTERVAL_S = 0.5
"""Between two reports about waiting requests; a prompt in work reports after each of its steps."""

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Smallest key first; among equal keys the first to come. An entry that was removed is skipped
    when it comes up, and all such entries are dropped once they outnumber the others."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._next_ticket = count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        """Everything in it, in the order in which it came."""
        return iter(self._tickets)

    def push(self, key: Any, item: T) -> None:
        ticket = next(self._next_ticket)
        self._tickets[item] = ticket
        heapq.heappush(self._entries, (key, ticket, item))

    def first(self) -> tuple[Any, T]:
        """The smallest key and its item."""
        entries, tickets = self._entries, self._tickets
        while tickets.get(entries[0][2]) != entries[0][1]:
            heapq.heappop(entries)
        return entries[0][0], entries[0][2]

    def pop(self) -> T:
        item = self.first()[1]
        heapq.heappop(self._entries)
        del self._tickets[item]
        return item

    def remove(self, item: T) -> bool:
        """Forget an item; returns whether it was there."""
        if self._tickets.pop(item, None) is None:
            return False
        if len(self._entries) > 2 * len(self._tickets) + 16:
            self._entries = [e for e in self._entries if self._tickets.get(e[2]) == e[1]]
            heapq.heapify(self._entries)
        return True


class Tenants:
    """How many tokens have been computed for each tenant, so that rows go to the least served.

    Tenants are numbered while they have requests in the engine.

    Service counts only in comparison: a new tenant starts level with the least served of those with
    requests (or above, where it had more before it paused), so that none can save up service.

    Tenants are ordered by age, since the queue protects older ones from newer ones: names cost
    nothing, and a flood of new ones must not take the places of those that came before. A
    tenant that has been admitted once keeps its age when it pauses. Where more names come than can
    be kept, the newest are forgotten.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._num_requests: list[int] = []
        self._service: Int64Array = np.zeros(0, np.int64)
        self._turns: list[int] = []
        self._num_turns = 0
        self._idle: dict[str, int] = {}
        """Service of tenants without requests, while others have some."""
        self._ages: dict[str, int] = {}
        """The number of each tenant's arrival, oldest first."""
        self._num_arrivals = 0
        self._unproven: set[str] = set()
        """Those of them that were never admitted."""

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, name: str) -> int:
        """The number of a tenant that has requests."""
        return self._slots[name]

    def standing(self, slot: int) -> tuple[int, int]:
        """Smallest goes first: tokens of service, then the turn at which it last got a row."""
        return int(self._service[slot]), self._turns[slot]

    def join(self, name: str) -> int:
        """A tenant's request has come; returns the tenant's number."""
        slot = self._slots.get(name)
        if slot is None:
            level = self._least_service()
            slot = self._free_slots.pop() if self._free_slots else self._grow()
            self._slots[name] = slot
            self._service[slot] = max(level, self._idle.pop(name, 0))
            self._turns[slot] = 0
            if name not in self._ages:
                self._num_arrivals += 1
                self._ages[name] = self._num_arrivals
                self._unproven.add(name)
        self._num_requests[slot] += 1
        return slot

    def age(self, name: str) -> int:
        """Smaller is older; of a tenant that is not known, the age that it would get."""
        return self._ages.get(name, self._num_arrivals + 1)

    def leave(self, name: str) -> None:
        """A request of the tenant has ended."""
        slot = self._slots[name]
        self._num_requests[slot] -= 1
        if self._num_requests[slot]:
            return
        del self._slots[name]
        self._free_slots.append(slot)
        self._forget_newest(name)
        if not self._slots:
            self._idle.clear()  # there is no other left to be compared with
            return
        self._idle[name] = int(self._service[slot])
        if len(self._idle) > MAX_IDLE_TENANTS:
            del self._idle[next(iter(self._idle))]

    def _forget_newest(self, left: str) -> None:
        """Keep the ages of old tenants, not of all that ever sent something."""
        if left in self._unproven:
            self._unproven.remove(left)
            del self._ages[left]
        elif len(self._ages) > MAX_KNOWN_TENANTS:
            newest = next(name for name in reversed(self._ages) if name not in self._slots)
            del self._ages[newest]

    def admitted(self, name: str, num_tokens: int) -> int:
        """A request of the tenant got a row and computes its first tokens; returns the tenant's
        number."""
        slot = self._slots[name]
        self._unproven.discard(name)
        self._num_turns += 1
        self._turns[slot] = self._num_turns
        if len(self._slots) > 1:  # a tenant alone is compared with none
            self._service[slot] += num_tokens
        return slot

    def charge(self, slots: Int32Array, num_tokens: Int32Array) -> None:
        """Rows of these tenants compute tokens."""
        np.add.at(self._service, slots, num_tokens)

    def _least_service(self) -> int:
        active = list(self._slots.values())
        return int(self._service[active].min()) if active else 0

    def _grow(self) -> int:
        self._service = np.append(self._service, np.int64(0))
        self._turns.append(0)
        self._num_requests.append(0)
        return len(self._num_requests) - 1


class Pace:
    """How quickly the engine works: rates over the time in which there was work; the recent past
    counts most."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._busy_s = 0.0
        self._computed = 0.0
        self._admitted = 0.0
        self._newly_admitted = 0

    def admitted(self, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` left the queue."""
        self._newly_admitted += num_tokens

    def planned(self, now: float, num_tokens: int) -> None:
        """A step of `num_tokens` is planned."""
        if self._last is not None:
            elapsed = now - self._last
            fading = math.exp(-elapsed / MEMORY_S)
            self._busy_s = self._busy_s * fading + elapsed
            self._computed = self._computed * fading + num_tokens
            self._admitted = self._admitted * fading + self._newly_admitted
            self._newly_admitted = 0
        self._last = now

    def rested(self) -> None:
        """There is nothing to do; the time until the next step does not count."""
        self._last = None

    @property
    def computed_per_s(self) -> float:
        """Tokens computed per second, 0 while that is unknown."""
        return self._computed / self._busy_s if self._busy_s else 0.0

    @property
    def admitted_per_s(self) -> float:
        """Prompt tokens that leave the queue per second, 0 while that is unknown."""
        return self._admitted / self._busy_s if self._busy_s else 0.0


class Lane:
    """Waiting sequences of one priority, one tenant, or all tenants that return, and one adapter or
    none."""

    def __init__(self, priority: int, slot: int, adapter: str) -> None:
        self.priority = priority
        self.slot = slot
        self.adapter = adapter
        """The digest of its content; "" for none."""
        self.is_blocked = False
        """Whether it is out of order: there is no room for its adapter."""
        self.sequences: LazyHeap[Sequence] = LazyHeap()
        self.num_tokens_in = 0
        """Tokens of all requests that ever came, and of those that left again."""
        self.num_tokens_out = 0


@dataclass(frozen=True)
class Bound:
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


class WaitingQueue:
    """Lowest priority value first. Within a priority, requests that have begun and wait again (or
    belong to one that has begun) return in the order in which they were admitted; then tenants
    take turns, the least served first; each tenant's requests come in the order of arrival.

    Lanes lie in a heap by their tenants' standing, and by their first sequences where a tenant has
    several. A standing only rises, so a lane whose place is out of date is put right when it comes
    up: O(log n) for each tenant served since the last time.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.tenants = Tenants()
        self.pace = Pace()
        self._lanes: dict[tuple[int, int, str], Lane] = {}
        self.lanes_of: dict[str, list[Lane]] = {}
        """Those of each adapter, by the digest of its content."""
        self._order: LazyHeap[Lane] = LazyHeap()
        self._lane_of: dict[Sequence, Lane] = {}
        self.held_back: dict[str, Sequence] = {}
        """By request id, first sequences of requests that are counted here but have no turn yet: a
        grammar is being compiled, or an adapter loads."""
        self._num_awaited: dict[Sequence, int] = {}
        self.num_new = 0
        """Requests that have never run, and their prompt tokens."""
        self.num_new_tokens = 0
        self.new_of: dict[str, tuple[int, int]] = {}
        """The same for each tenant that has some."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(lane.sequences for lane in self._lanes.values())

    def push(self, sequence: Sequence) -> None:
        self._release(sequence)
        lane = self._lane(sequence)
        is_first = not lane.sequences or sequence.rank[1] < lane.sequences.first()[0]
        lane.sequences.push(sequence.rank[1], sequence)
        self._lane_of[sequence] = lane
        if is_first and not lane.is_blocked:
            self._order.push(self._key(lane), lane)
        lane.num_tokens_in += sequence.num_prompt
        if lane.slot != RETURNING:
            self._count_new(sequence, 1)

    def hold_back(self, sequence: Sequence, num_awaited: int) -> None:
        """Count a request as waiting that has no turn before it is pushed: it awaits so many
        things."""
        self.held_back[sequence.request_id] = sequence
        self._num_awaited[sequence] = num_awaited
        self._count_new(sequence, 1)

    def still_awaits(self, sequence: Sequence) -> bool:
        """One thing that a request awaited has come; whether it awaits more."""
        self._num_awaited[sequence] -= 1
        return self._num_awaited[sequence] > 0

    def _release(self, sequence: Sequence) -> None:
        if self.held_back.get(sequence.request_id) is sequence:
            del self.held_back[sequence.request_id], self._num_awaited[sequence]
            self._count_new(sequence, -1)

    def first(self) -> Sequence | None:
        """Whose turn it is, among those that may have one."""
        while self._order:
            key, lane = self._order.first()
            if len(self._order) > 1 and key != self._key(lane):
                self._order.push(self._key(lane), lane)
                continue
            return lane.sequences.first()[1]
        return None

    @property
    def has_begun(self) -> bool:
        """Whether one is here that has begun."""
        return any(lane.slot == RETURNING for lane in self._lanes.values())

    def first_begun(self) -> Sequence | None:
        """Who is next among those that have begun and may have a turn."""
        lanes = (lane for lane in self._lanes.values() if lane.slot == RETURNING)
        first = min((lane for lane in lanes if not lane.is_blocked), key=self._key, default=None)
        return None if first is None else first.sequences.first()[1]

    def block(self, sequence: Sequence) -> None:
        """Take a sequence and those like it out of the order, until `unblock`: there is no room for
        their adapter."""
        lane = self._lane_of[sequence]
        lane.is_blocked = True
        self._order.remove(lane)

    def unblock(self, adapter: str) -> None:
        for lane in self.lanes_of.get(adapter, ()):
            self._unblock(lane)

    def unblock_begun(self) -> None:
        for lane in self._lanes.values():
            if lane.slot == RETURNING:
                self._unblock(lane)

    def _unblock(self, lane: Lane) -> None:
        if lane.is_blocked:
            lane.is_blocked = False
            self._order.push(self._key(lane), lane)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here."""
        self._release(sequence)
        lane = self._lane_of.pop(sequence, None)
        if lane is None:
            return
        lane.sequences.remove(sequence)
        if not lane.sequences:
            del self._lanes[lane.priority, lane.slot, lane.adapter]
            self._order.remove(lane)
            self.lanes_of[lane.adapter].remove(lane)
            if not self.lanes_of[lane.adapter]:
                del self.lanes_of[lane.adapter]
        lane.num_tokens_out += sequence.num_prompt
        if lane.slot != RETURNING:
            self._count_new(sequence, -1)

    def lane_of(self, sequence: Sequence) -> Lane:
        return self._lane_of[sequence]

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def _count_new(self, sequence: Sequence, change: int) -> None:
        tenant, tokens = sequence.new.tenant, change * sequence.num_prompt
        self.num_new += change
        self.num_new_tokens += tokens
        num_requests, num_tokens = self.new_of.get(tenant, (0, 0))
        if num_requests + change:
            self.new_of[tenant] = num_requests + change, num_tokens + tokens
        else:
            del self.new_of[tenant]

    def _lane(self, sequence: Sequence) -> Lane:
        priority = sequence.rank[0]
        slot = RETURNING if sequence.has_begun else self.tenants.slot(sequence.new.tenant)
        adapter = "" if sequence.adapter is None else sequence.adapter.digest
        lane = self._lanes.get((priority, slot, adapter))
        if lane is None:
            lane = self._lanes[priority, slot, adapter] = Lane(priority, slot, adapter)
            self.lanes_of.setdefault(adapter, []).append(lane)
        return lane

    def _key(self, lane: Lane) -> tuple[int, bool, tuple[int, int], int]:
        first = lane.sequences.first()[0]
        if lane.slot == RETURNING:
            return lane.priority, False, (0, 0), first
        return lane.priority, True, self.tenants.standing(lane.slot), first

    # --- bounds ---------------------------------------------------------------------------------

    def make_room(self, new: NewRequest, num_free_rows: int) -> list[str]:
        """Ids of waiting requests that must end for `new` to wait; `OverloadedError` if it may not.

        Requests that find a free row when the next step is planned are not counted, and a prompt
        that is longer than the bound on tokens may wait if it waits alone. A tenant that has less
        than its share of the queue still gets in, until the queue is `FULLEST` times as long as its
        bound: a tenant that fills it keeps no other out. Shares count tenants that are as old or
        older, so new ones make no other's smaller; and where the queue is that long, requests of
        newer tenants that have more than their share make room.
        """
        num_queued = self.num_new - num_free_rows
        if num_queued < 0:
            return []
        limits, tokens = self._limits, self.num_new_tokens
        bounds = [Bound("max_num_queued_reqs", limits.max_num_queued_reqs, num_queued, 1, 0)]
        if tokens:
            most, num_prompt = limits.max_num_queued_tokens, len(new.prompt_token_ids)
            bounds.append(Bound("max_num_queued_tokens", most, tokens, num_prompt, 1))
        if all(bound.is_kept for bound in bounds):
            return []
        age, own = self.tenants.age(new.tenant), self.new_of.get(new.tenant, (0, 0))
        num_older = sum(self.tenants.age(name) < age for name in self.new_of)
        for bound in bounds:
            if not bound.is_kept and own[bound.part] + bound.more > bound.share(num_older):
                raise self._overloaded(new, bound)
        excess = [bound.excess for bound in bounds]
        displaced: list[str] = []
        for sequence in self._beyond_shares(new.tenant, bounds) if any(excess) else ():
            displaced.append(sequence.request_id)
            counts = (1, sequence.num_prompt)
            excess = [left - counts[bound.part] for left, bound in zip(excess, bounds, strict=True)]
            if max(excess) <= 0:
                break
        if max(excess) > 0:
            raise self._overloaded(new, bounds[excess.index(max(excess))])
        return displaced

    def _beyond_shares(self, tenant: str, bounds: list[Bound]) -> Iterator[Sequence]:
        """What tenants newer than this one have waiting beyond their shares; the newest tenant's
        first, and of each the last in rank first."""
        names = sorted({*self.new_of, tenant}, key=self.tenants.age)
        waiting: dict[str, list[Sequence]] = {name: [] for name in names}
        new = [lane.sequences for lane in self._lanes.values() if lane.slot != RETURNING]
        for sequence in chain(*new, self.held_back.values()):
            waiting[sequence.new.tenant].append(sequence)
        limited = [bound for bound in bounds if bound.limit]
        for num_older in range(len(names) - 1, names.index(tenant), -1):
            name = names[num_older]
            counts = list(self.new_of[name])
            for sequence in sorted(waiting[name], key=lambda one: one.rank, reverse=True):
                if all(counts[bound.part] <= bound.share(num_older) for bound in limited):
                    break
                yield sequence
                counts[0] -= 1
                counts[1] -= sequence.num_prompt

    def _overloaded(self, new: NewRequest, bound: Bound) -> OverloadedError:
        seconds = self._seconds_to_half()
        if bound.setting == "max_num_queued_reqs":
            reason = (
                f"{self.num_new} requests are waiting, and {bound.setting}={bound.limit} allows no "
                "more"
            )
        else:
            reason = (
                f"{self.num_new} requests with {self.num_new_tokens} prompt tokens are waiting, "
                f"and {bound.setting}={bound.limit} leaves no room for "
                f"{len(new.prompt_token_ids)} more"
            )
        return OverloadedError(
            f"the engine is overloaded: {reason}. Try again in about {seconds} s, or raise "
            f"{bound.setting}.",
            retry_after_s=seconds,
        )

    def _seconds_to_half(self) -> int:
        """When half of the queue should be gone: those sent away must not all find it full
        again."""
        rate = self.pace.admitted_per_s
        seconds = self.num_new_tokens / 2 / rate if rate else MIN_RETRY_S
        return math.ceil(min(max(seconds, MIN_RETRY_S), MAX_RETRY_S))


class ProgressReports:
    """For requests that ask for them."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._waiting: dict[Sequence, int] = {}
        """With the tokens that had come into its lane before it."""
        self._computing: dict[Sequence, int] = {}
        """With the tokens last reported."""
        self._next_time = 0.0

    @property
    def next_time(self) -> float | None:
        """When waiting requests get their next report."""
        return self._next_time if self._waiting else None

    def add(self, sequence: Sequence) -> None:
        """A request has joined the queue."""
        lane = self._queue.lane_of(sequence)
        self._waiting[sequence] = lane.num_tokens_in - sequence.num_prompt

    def begin(self, sequence: Sequence) -> None:
        """A request got a row."""
        if self._waiting.pop(sequence, None) is not None:
            self._computing[sequence] = -1

    def remove(self, sequence: Sequence) -> None:
        """It has its first token, or has ended."""
        self._waiting.pop(sequence, None)
        self._computing.pop(sequence, None)

    def collect(self, now: float) -> list[RequestProgress]:
        """What has changed since the last time."""
        reports = []
        for sequence, reported in self._computing.items():
            processed = _num_processed(sequence)
            if processed > reported:
                self._computing[sequence] = processed
                left = sequence.num_prompt - processed
                reports.append(_report(sequence, processed, self._seconds(left)))
        if self._waiting and now >= self._next_time:
            self._next_time = now + PROGRESS_INTERVAL_S
            for sequence, before in self._waiting.items():
                reports.append(_report(sequence, 0, self._eta_s(sequence, before)))
        return reports

    def _seconds(self, num_tokens: int) -> float | None:
        rate = self._queue.pace.computed_per_s
        return num_tokens / rate if rate else None

    def _eta_s(self, sequence: Sequence, before: int) -> float | None:
        """Until the first token: lanes take turns, so what is ahead in the own one counts once for
        each, up to all that waits."""
        queue = self._queue
        lane, rate = queue.lane_of(sequence), queue.pace.admitted_per_s
        ahead = max(before - lane.num_tokens_out, 0) * queue.num_lanes
        ahead = min(ahead, queue.num_new_tokens - sequence.num_prompt)
        own = self._seconds(sequence.num_prompt)
        if own is None or not ahead:
            return own
        return own + ahead / rate if rate else None


def _num_processed(sequence: Sequence) -> int:
    """Prompt tokens whose results have come, as far as the host can tell."""
    columns, row = sequence.columns, sequence.row
    if row < 0:
        return 0
    computed = columns.computed_before if columns.in_flight[row] else columns.num_computed
    return min(int(computed[row]), sequence.num_prompt)


def _report(sequence: Sequence, processed: int, eta_s: float | None) -> RequestProgress:
    cached = max(sequence.num_cached, 0)
    return RequestProgress(sequence.key, sequence.num_prompt, processed, cached, eta_s)
