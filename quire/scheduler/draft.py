"""`PlanDraft`: collects the parts of a step while it is scheduled, then becomes a `StepPlan`."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import AddedRow, BoolArray, Int32Array, StepPlan, empty_ints


def _join(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else empty_ints()


class PlanDraft:
    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that may still be computed in this step."""
        self.added_rows: list[AddedRow] = []
        self.preempted = False
        self.held_blocks: list[int] = []
        """Sources of copies, referenced until the plan is complete."""
        self._rows: list[Int32Array] = []
        self._counts: list[Int32Array] = []
        self._samples: list[BoolArray] = []
        self._block_rows: list[Int32Array] = []
        self._block_indices: list[Int32Array] = []
        self._block_ids: list[Int32Array] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def empty(self) -> bool:
        return not self._rows

    def compute(self, rows: Int32Array, counts: Int32Array, samples: BoolArray) -> None:
        self._rows.append(rows)
        self._counts.append(counts)
        self._samples.append(samples)
        self.budget -= int(counts.sum())

    def write_blocks(self, rows: Int32Array, indices: Int32Array, ids: Int32Array) -> None:
        self._block_rows.append(rows)
        self._block_indices.append(indices)
        self._block_ids.append(ids)

    def copy_block(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def finish(self, freed_rows: list[int], appends: list[tuple[int, int]]) -> StepPlan:
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        known = np.array(appends, np.int32).reshape(-1, 2)
        return StepPlan(
            step=self.step,
            freed_rows=np.array(freed_rows, np.int32),
            added_rows=self.added_rows,
            append_rows=known[:, 0],
            append_tokens=known[:, 1],
            block_rows=_join(self._block_rows),
            block_indices=_join(self._block_indices),
            block_ids=_join(self._block_ids)[None],
            copy_sources=copies[:, 0],
            copy_targets=copies[:, 1],
            rows=_join(self._rows),
            num_new_tokens=_join(self._counts),
            samples=np.concatenate(self._samples),
        )
