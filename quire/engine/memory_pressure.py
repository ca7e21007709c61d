"""`MemoryPressure`: how the engine goes on when a step runs out of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.protocol.errors import StepMemoryError
from quire.protocol.plan import StepPlan
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

SHRINK_FACTOR = 4
STEPS_BEFORE_GROWTH = 16
"""Steps that must succeed before larger ones are tried. Twice as many after each try that failed:
a failure costs all requests a restart, and long prompts must get through between two of them."""
MAX_STEPS_BEFORE_GROWTH = 1 << 14
FIRST_PAUSE_S = 0.1
MAX_PAUSES = 5
"""Each pause is twice as long as the one before: about 3 s in all for the memory to come back."""


class MemoryPressure:
    """Steps get smaller until they fit. Where not even one token does, or nothing is left, the
    engine waits a little, then ends that step's requests with an error and goes on with the others.

    The step size grows back once steps succeed. Until then the engine waits for each step before
    it launches the next, whose failure would cost the first one's tokens.
    """

    def __init__(self, scheduler: Scheduler, sleep: Callable[[float], None] = time.sleep) -> None:
        self._scheduler = scheduler
        self._sleep = sleep
        self._num_pauses = 0
        self._num_good_steps = 0
        self._steps_before_growth = STEPS_BEFORE_GROWTH
        self._has_grown = False

    @property
    def is_on(self) -> bool:
        return (
            self._scheduler.max_step_tokens < self._scheduler.limits.max_num_batched_tokens
            or self._steps_before_growth > STEPS_BEFORE_GROWTH
        )

    def step_failed(
        self, num_tokens: int, suspects: list[Sequence], error: StepMemoryError
    ) -> None:
        """A step of `num_tokens` for `suspects` found no memory; all its requests wait again."""
        if self._has_grown:
            longer = min(2 * self._steps_before_growth, MAX_STEPS_BEFORE_GROWTH)
            self._steps_before_growth, self._has_grown = longer, False
        self._num_good_steps = 0
        scheduler = self._scheduler
        if num_tokens > 1 and not error.is_exhausted:
            scheduler.max_step_tokens = max(1, num_tokens // SHRINK_FACTOR)
            logger.warning(
                "a step of %d tokens ran out of memory and is tried again with at most %d: %s",
                num_tokens,
                scheduler.max_step_tokens,
                error,
            )
        elif self._num_pauses < MAX_PAUSES:
            pause_s = FIRST_PAUSE_S * 2**self._num_pauses
            logger.warning("no step finds memory, waiting %.1f s: %s", pause_s, error)
            self._num_pauses += 1
            self._sleep(pause_s)
        else:
            for request in suspects:
                logger.error("request %r ends: out of memory: %s", request.request_id, error)
                scheduler.fail_request(request.request_id, f"out of memory: {error}")

    def step_done(self, plan: StepPlan) -> None:
        """A step's result has arrived."""
        if plan.samples.any():  # else a request may get through its prompt and fail ever again
            self._num_pauses = 0
        if not self.is_on:
            return
        scheduler = self._scheduler
        most = scheduler.limits.max_num_batched_tokens
        self._num_good_steps += 1
        if self._num_good_steps < self._steps_before_growth:
            return
        self._num_good_steps = 0
        if scheduler.max_step_tokens == most:
            self._steps_before_growth, self._has_grown = STEPS_BEFORE_GROWTH, False
            return
        self._has_grown = True
        scheduler.max_step_tokens = min(most, 2 * scheduler.max_step_tokens)
        logger.info("steps may have %d tokens again", scheduler.max_step_tokens)
