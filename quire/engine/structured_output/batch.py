"""`Batch`: the constrained requests that a step samples for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.structured_output.bits import MaskSettings
from quire.engine.structured_output.matcher import Matcher
from quire.protocol.plan import BoolArray, Int32Array, StepPlan
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from llguidance import LLExecutor


class Batch:
    """Kept from step to step as long as the same requests run. After a forward pass nothing is in
    the processor's caches, and what looks like a moment's work takes a tenth of a millisecond: so
    all that does not change is gathered once."""

    def __init__(
        self, plan: StepPlan, places: Int32Array, members: Sequence[tuple[Request, Matcher]]
    ) -> None:
        """`places` are among the plan's rows that sample; each of these has one line."""
        matchers = [matcher for _, matcher in members]
        self.places = places
        self.lines = plan.first_lines[places]
        self.members = members
        self.rows: Int32Array = plan.rows[plan.samples][places]
        self.num_words = matchers[0].grammar.num_words if matchers else 0
        self.settings = MaskSettings(matchers)
        self.may_jump: BoolArray = np.array([matcher.may_jump for matcher in matchers], np.bool_)
        self._plan = _composition(plan)
        self._epochs = plan.epochs[plan.samples][places].tobytes()
        # Copies of one start lock each other out: they are kept together, so that threads take
        # different ones.
        order = sorted(range(len(matchers)), key=lambda i: id(matchers[i].start))
        self._work = [(matchers[i].native, i) for i in order]
        self._has_one_start = len({id(matcher.start) for matcher in matchers}) == 1

    def is_that_of(self, plan: StepPlan, epochs: Int32Array) -> bool:
        """Whether a plan has the same samples, and they all still count. `epochs` are those of all
        rows now."""
        return self._plan == _composition(plan) and self._epochs == epochs[self.rows].tobytes()

    def fill(self, bits: Int32Array, pool: Callable[[], LLExecutor]) -> None:
        """What the grammars alone allow, to `bits` [members, words]."""
        address, stride = bits.ctypes.data, bits.strides[0]
        if self._has_one_start:
            for native, i in self._work:
                native.unsafe_compute_mask_ptr(address + i * stride, stride)
        else:
            pool().unsafe_compute_mask_ptr(self._work, address, stride, len(bits))


def _composition(plan: StepPlan) -> tuple[bytes, bytes, bytes]:
    """Equal for plans in which the same requests compute and sample."""
    return plan.rows.tobytes(), plan.epochs.tobytes(), plan.num_samples.tobytes()
