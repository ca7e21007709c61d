"""`Deadlines`: requests that end by themselves at a given time. Only the earliest is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.scheduler.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


class Deadlines:
    def __init__(self) -> None:
        self._request_ids: LazyHeap[str] = LazyHeap()

    def add(self, request_id: str, deadline: float) -> None:
        self._request_ids.push(deadline, request_id)

    def remove(self, request_id: str) -> None:
        self._request_ids.remove(request_id)

    @property
    def next(self) -> float | None:
        """The earliest one."""
        return self._request_ids.first()[0] if self._request_ids else None

    def expire(self, scheduler: Scheduler, now: float) -> None:
        """End the requests whose time is up: by "timeout" where no token was on its way, else by
        "abort", with the tokens they have."""
        while self._request_ids and self._request_ids.first()[0] <= now:
            request_id = self._request_ids.pop()
            begun = any(r.num_generated > 0 for r in scheduler.requests[request_id])
            scheduler.abort(request_id, "abort" if begun else "timeout", now=now)
