"""`ProgressReports`: how far prompts have come and how long they will take, for who asks."""

from __future__ import annotations

from quire.protocol.output import RequestProgress
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.sequence import Sequence

INTERVAL_S = 0.5
"""Between two reports to those who wait; a prompt in work reports after each of its steps."""


class ProgressReports:
    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._waiting: dict[Sequence, int] = {}
        """With the tokens that had come into its lane before it."""
        self._computing: dict[Sequence, int] = {}
        """With the tokens last reported."""
        self._next_time = 0.0

    @property
    def next_time(self) -> float | None:
        """When those who wait hear the next time."""
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
            self._next_time = now + INTERVAL_S
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
