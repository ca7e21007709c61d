"""`MemoryPressure`: how large steps may be while they find no memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.protocol.errors import StepMemoryError
from quire.protocol.plan import StepPlan

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
    """What follows when a step finds no memory: steps get smaller until they fit. Where not even
    one token fits, or no memory is left, the engine waits a little, then gives that step's requests
    up and goes on with the others.

    The step size grows back once steps succeed. Until then the engine waits for each step before
    it launches the next, whose failure would cost the first one's tokens.
    """

    def __init__(
        self, max_num_batched_tokens: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.max_step_tokens = max_num_batched_tokens
        """Most tokens that a step may have now."""
        self._most = max_num_batched_tokens
        self._sleep = sleep
        self._num_pauses = 0
        self._num_good_steps = 0
        self._steps_before_growth = STEPS_BEFORE_GROWTH
        self._has_grown = False

    @property
    def is_on(self) -> bool:
        is_small = self.max_step_tokens < self._most
        return is_small or self._steps_before_growth > STEPS_BEFORE_GROWTH

    def step_failed(self, num_tokens: int, error: StepMemoryError) -> bool:
        """A step of `num_tokens` found no memory; returns whether its requests are given up. If
        not, they are tried again."""
        if self._has_grown:
            longer = min(2 * self._steps_before_growth, MAX_STEPS_BEFORE_GROWTH)
            self._steps_before_growth, self._has_grown = longer, False
        self._num_good_steps = 0
        if num_tokens > 1 and not error.is_exhausted:
            self.max_step_tokens = max(1, num_tokens // SHRINK_FACTOR)
            logger.warning(
                "a step of %d tokens ran out of memory and is tried again with at most %d: %s",
                num_tokens,
                self.max_step_tokens,
                error,
            )
            return False
        if self._num_pauses == MAX_PAUSES:
            return True
        pause_s = FIRST_PAUSE_S * 2**self._num_pauses
        logger.warning("no step finds memory, waiting %.1f s: %s", pause_s, error)
        self._num_pauses += 1
        self._sleep(pause_s)
        return False

    def step_done(self, plan: StepPlan) -> None:
        """A step's result has arrived."""
        if plan.samples.any():  # else a request that fails after its prompt is tried for ever
            self._num_pauses = 0
        if not self.is_on:
            return
        self._num_good_steps += 1
        if self._num_good_steps < self._steps_before_growth:
            return
        self._num_good_steps = 0
        if self.max_step_tokens == self._most:
            self._steps_before_growth, self._has_grown = STEPS_BEFORE_GROWTH, False
            return
        self._has_grown = True
        self.max_step_tokens = min(self._most, 2 * self.max_step_tokens)
        logger.info("steps may have %d tokens again", self.max_step_tokens)
