"""`WaitingQueue`: requests without a row, in the policy's order."""

from __future__ import annotations

import heapq
from itertools import count

from quire.scheduler.request import Request


class WaitingQueue:
    """A heap by rank. A preempted request has an old rank and so returns to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._members: set[Request] = set()
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, next(self._ticket), request))
        self._members.add(request)

    def first(self) -> Request:
        while self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        request = self.first()
        heapq.heappop(self._heap)
        self._members.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request; its heap entry is skipped when it comes up."""
        self._members.discard(request)
