"""`Batch`: the constrained requests that a step samples for, and their masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.structured_output.matcher import WORD_BITS, Matcher, Words, token_bits
from quire.protocol.plan import BoolArray, Int32Array, StepPlan
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor


class Batch:
    """Kept from step to step as long as the same requests run. After a forward pass nothing is in
    the processor's caches, and what looks like a moment's work takes a tenth of a millisecond: so
    all that does not change is gathered once."""

    def __init__(
        self, plan: StepPlan, places: Int32Array, members: list[tuple[Sequence, Matcher]]
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


class MaskSettings:
    """What requests say about their ends and about allowed tokens, one request for each row. Brings
    masks that grammars alone have made in line with it, for all rows of a step at once: a few array
    operations instead of some for each row."""

    def __init__(self, matchers: list[Matcher]) -> None:
        self._matchers = matchers
        rows_of: dict[Any, list[int]] = {}
        for row, matcher in enumerate(matchers):
            rows_of.setdefault((matcher.eos, matcher.ends), []).append(row)
        self._ends = [
            _Ends(np.array(rows)[:, None], eos, ends) for (eos, ends), rows in rows_of.items()
        ]
        self._allowed = [
            (row, matcher.allowed)
            for row, matcher in enumerate(matchers)
            if matcher.allowed is not None
        ]

    def apply(self, masks: Int32Array) -> BoolArray:
        """Bring `masks` [rows, words] in line; returns which rows are left with one token.

        A matcher whose mask is empty fails. Its mask then allows everything, for the sampler must
        find some token; that is thrown away.
        """
        for matcher in self._matchers:
            matcher.check()
        words = masks.view(np.uint32)
        for ends in self._ends:
            ends.apply(words)
        for row, allowed in self._allowed:
            words[row] &= allowed
        union = np.bitwise_or.reduce(words, axis=1)
        one_token: BoolArray = union & (union - np.uint32(1)) == 0
        for row in np.flatnonzero(one_token).tolist():
            one_token[row] = np.count_nonzero(words[row]) == 1
            if not union[row]:
                self._matchers[row].found_nothing()
        for row, matcher in enumerate(self._matchers):
            if matcher.failure is not None:
                masks[row] = -1
        return one_token


class _Ends:
    """Allows `ends` where the grammar allows an end, which it shows by any of `eos`."""

    def __init__(
        self, rows: NDArray[np.int64], eos: tuple[int, ...], ends: tuple[int, ...]
    ) -> None:
        """`rows` [rows, 1]"""
        self._places = rows, np.array(sorted({token // WORD_BITS for token in (*eos, *ends)}), int)
        num_words = 1 + max((*eos, *ends), default=0) // WORD_BITS
        self._eos = token_bits(eos, num_words)[self._places[1]]
        self._ends = token_bits(ends, num_words)[self._places[1]]

    def apply(self, words: Words) -> None:
        some = words[self._places]
        shown = some & self._eos
        some ^= shown
        some |= self._ends * shown.any(axis=1, keepdims=True)
        words[self._places] = some
