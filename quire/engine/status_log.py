"""`StatusLog`: one line every few seconds while the engine is busy, and none while it is not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Counts:
    time: float
    prompt: int
    generated: int
    queries: int
    hits: int
    preemptions: int


class StatusLog:
    """`look` belongs after every step. Work that ends sooner than `interval_s` says nothing."""

    def __init__(self, scheduler: Scheduler, interval_s: float = 10.0) -> None:
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._before: _Counts | None = None
        self._last_look = 0.0

    def look(self, now: float) -> None:
        # Time without work is no part of a rate: after a pause a new interval begins.
        was_idle = now - self._last_look >= self._interval_s
        self._last_look = now
        if self._before is None or was_idle:
            self._before = self._counts(now)
        elif now - self._before.time >= self._interval_s:
            counts = self._counts(now)
            logger.info("%s", self._line(self._before, counts))
            self._before = counts

    def _counts(self, now: float) -> _Counts:
        metrics = self._scheduler.metrics
        return _Counts(
            now,
            metrics.prompt_tokens.value,
            metrics.generation_tokens.value,
            metrics.queries.value,
            metrics.hits.value,
            metrics.preemptions.value,
        )

    def _line(self, before: _Counts, now: _Counts) -> str:
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        passed = now.time - before.time
        queries = now.queries - before.queries
        hits = f"{(now.hits - before.hits) / queries:.1%}" if queries else "none asked for"
        return (
            f"{(now.prompt - before.prompt) / passed:.1f} prompt tokens/s, "
            f"{(now.generated - before.generated) / passed:.1f} generated tokens/s, "
            f"{scheduler.num_running} running, {len(scheduler.waiting)} waiting, "
            f"KV cache {pool.num_used / scheduler.limits.num_blocks:.1%} used, "
            f"prefix hits {hits}, {now.preemptions - before.preemptions} preemptions"
        )
