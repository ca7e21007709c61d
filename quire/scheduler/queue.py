"""`WaitingQueue`: requests without a row, in the order in which they get one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count

from quire.scheduler.lazy_heap import LazyHeap
from quire.scheduler.request import Request
from quire.scheduler.tenants import Tenants

RETURNING = -1


class Lane:
    """Waiting requests of one priority and one tenant, or of all tenants that return."""

    def __init__(self, priority: int, slot: int, number: int) -> None:
        self.priority = priority
        self.slot = slot
        self.number = number
        self.requests: LazyHeap[Request] = LazyHeap()
        self.num_tokens_in = 0
        """Tokens of all requests that ever came, and of those that left again."""
        self.num_tokens_out = 0


class WaitingQueue:
    """Lowest priority value first. Within a priority, requests that have begun and wait again (or
    belong to one that has begun) return in the order in which they were admitted; then tenants
    take turns, the least served first; each tenant's requests come in the order of arrival.

    Lanes lie in a heap by their tenants' standing. A standing only rises, so a lane whose place is
    out of date is put right when it comes up: O(log n) for each tenant served since the last time.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._order: LazyHeap[Lane] = LazyHeap()
        self._lane_of: dict[Request, Lane] = {}
        self._numbers = count()
        self._held_back: set[Request] = set()
        """Requests that are counted here but have no turn yet."""
        self.num_new = 0
        """Requests that have never run, and their prompt tokens."""
        self.num_new_tokens = 0
        self.new_of: dict[str, tuple[int, int]] = {}
        """The same for each tenant that has some."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._lane_of

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(lane.requests for lane in self._lanes.values())

    def push(self, request: Request) -> None:
        self._release(request)
        lane = self._lane(request)
        lane.requests.push(request.rank[1], request)
        self._lane_of[request] = lane
        lane.num_tokens_in += request.num_prompt
        if lane.slot != RETURNING:
            self._count_new(request, 1)

    def hold_back(self, request: Request) -> None:
        """Count a request as waiting that has no turn before it is pushed."""
        self._held_back.add(request)
        self._count_new(request, 1)

    def _release(self, request: Request) -> None:
        if request in self._held_back:
            self._held_back.remove(request)
            self._count_new(request, -1)

    def first(self) -> Request:
        """Whose turn it is."""
        while True:
            key, lane = self._order.first()
            if len(self._order) > 1 and key != self._key(lane):
                self._order.push(self._key(lane), lane)
                continue
            return lane.requests.first()[1]

    def first_begun(self) -> Request | None:
        """Who is next among those that have begun."""
        lanes = [lane for lane in self._lanes.values() if lane.slot == RETURNING]
        if not lanes:
            return None
        return min(lanes, key=lambda lane: lane.priority).requests.first()[1]

    def remove(self, request: Request) -> None:
        """Forget a request, if it is here."""
        self._release(request)
        lane = self._lane_of.pop(request, None)
        if lane is None:
            return
        lane.requests.remove(request)
        if not lane.requests:
            del self._lanes[lane.priority, lane.slot]
            self._order.remove(lane)
        lane.num_tokens_out += request.num_prompt
        if lane.slot != RETURNING:
            self._count_new(request, -1)

    def lane_of(self, request: Request) -> Lane:
        return self._lane_of[request]

    def new_requests(self) -> Iterator[Request]:
        """Requests that have never run, held back or not."""
        lanes = [lane.requests for lane in self._lanes.values() if lane.slot != RETURNING]
        return chain(chain.from_iterable(lanes), self._held_back)

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def _count_new(self, request: Request, change: int) -> None:
        tenant, tokens = request.new.tenant, change * request.num_prompt
        self.num_new += change
        self.num_new_tokens += tokens
        num_requests, num_tokens = self.new_of.get(tenant, (0, 0))
        if num_requests + change:
            self.new_of[tenant] = num_requests + change, num_tokens + tokens
        else:
            del self.new_of[tenant]

    def _lane(self, request: Request) -> Lane:
        priority = request.rank[0]
        slot = RETURNING if request.has_begun else self._tenants.slot(request.new.tenant)
        lane = self._lanes.get((priority, slot))
        if lane is None:
            lane = self._lanes[priority, slot] = Lane(priority, slot, next(self._numbers))
            self._order.push(self._key(lane), lane)
        return lane

    def _key(self, lane: Lane) -> tuple[int, bool, tuple[int, int], int]:
        if lane.slot == RETURNING:
            return lane.priority, False, (0, 0), lane.number
        return lane.priority, True, self._tenants.standing(lane.slot), lane.number
