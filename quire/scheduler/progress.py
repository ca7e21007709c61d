"""`ProgressReports`: how far prompts have come and how long they will take, for who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.protocol.output import RequestProgress
from quire.scheduler.queue import Lane, WaitingQueue
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.scheduler.pace import Pace
    from quire.scheduler.scheduler import Scheduler

INTERVAL_S = 0.5
"""Between two reports to those who wait; a prompt in work reports after each of its steps."""


class ProgressReports:
    def __init__(self) -> None:
        self._waiting: dict[Request, int] = {}
        """With the tokens that had come into its lane before it."""
        self._computing: dict[Request, int] = {}
        """With the tokens last reported."""
        self._next_time = 0.0

    @property
    def next_time(self) -> float | None:
        """When those who wait hear the next time."""
        return self._next_time if self._waiting else None

    def add(self, request: Request, lane: Lane) -> None:
        """A request has joined the queue."""
        self._waiting[request] = lane.num_tokens_in - request.num_prompt

    def begin(self, request: Request) -> None:
        """A request got a row."""
        if self._waiting.pop(request, None) is not None:
            self._computing[request] = -1

    def remove(self, request: Request) -> None:
        """It has its first token, or has ended."""
        self._waiting.pop(request, None)
        self._computing.pop(request, None)

    def collect(self, scheduler: Scheduler, now: float) -> list[RequestProgress]:
        """What has changed since the last time."""
        reports = []
        for request, reported in self._computing.items():
            processed = _num_processed(request)
            if processed > reported:
                self._computing[request] = processed
                left = request.num_prompt - processed
                reports.append(_report(request, processed, _seconds(left, scheduler.pace)))
        if self._waiting and now >= self._next_time:
            self._next_time = now + INTERVAL_S
            for request, before in self._waiting.items():
                eta_s = _eta_s(request, before, scheduler.waiting, scheduler.pace)
                reports.append(_report(request, 0, eta_s))
        return reports


def _num_processed(request: Request) -> int:
    """Prompt tokens whose results have come, as far as the host can tell."""
    columns, row = request.columns, request.row
    if row < 0:
        return 0
    computed = columns.computed_before if columns.in_flight[row] else columns.num_computed
    return min(int(computed[row]), request.num_prompt)


def _report(request: Request, processed: int, eta_s: float | None) -> RequestProgress:
    cached = max(request.num_cached, 0)
    return RequestProgress(request.key, request.num_prompt, processed, cached, eta_s)


def _seconds(num_tokens: int, pace: Pace) -> float | None:
    return num_tokens / pace.computed_per_s if pace.computed_per_s else None


def _eta_s(request: Request, before: int, waiting: WaitingQueue, pace: Pace) -> float | None:
    """Until the first token: lanes take turns, so what is ahead in the own one counts once for
    each, up to all that waits."""
    lane = waiting.lane_of(request)
    ahead = max(before - lane.num_tokens_out, 0) * waiting.num_lanes
    ahead = min(ahead, waiting.num_new_tokens - request.num_prompt)
    own = _seconds(request.num_prompt, pace)
    if own is None or not ahead:
        return own
    return own + ahead / pace.admitted_per_s if pace.admitted_per_s else None
