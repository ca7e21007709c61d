"""What becomes of requests when a step or the engine fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from quire.protocol.output import FinishedSequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def recover(scheduler: Scheduler, failed_step: int) -> None:
    """After a failed step nothing from it on is computed: every running request starts over from
    its known tokens, and draws the same random numbers again."""
    scheduler.kv.tree.withdraw(failed_step)
    scheduler.num_steps_in_flight = 0
    for request in [r for r in scheduler.by_row if r is not None]:
        # Nothing of a row whose last step is lost may be published on release.
        scheduler.columns.num_computed[request.row] = 0
        if request.finish_reason is not None:
            scheduler.end(request, request.finish_reason)
        else:
            scheduler.requeue(request)


def fail_request(scheduler: Scheduler, request_id: str, error: str) -> None:
    """End all sequences of one request with an error. Nothing may be in flight (see `recover`)."""
    for request in list(scheduler.requests.get(request_id, ())):
        scheduler.waiting.remove(request)
        scheduler.end(request, "error", error=error)


def fail_all(scheduler: Scheduler, error: str) -> None:
    """End everything with an error, whatever state it is in: the engine is dead."""
    for request in [r for sequences in scheduler.requests.values() for r in sequences]:
        try:
            scheduler.waiting.remove(request)
            scheduler.end(request, "error", error=error)
        except Exception:
            logger.exception("request %r could not be ended in order", request.request_id)
            tokens = np.empty(0, np.int32)
            scheduler.ended.append(FinishedSequence(request.key, tokens, "error", error=error))
    scheduler.requests.clear()
