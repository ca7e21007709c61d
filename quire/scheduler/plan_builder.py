"""`PlanBuilder`: collects the parts of a step while it is scheduled, then builds a `StepPlan`."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import AddedRow, Int32Array, StepPlan, empty_ints


def _join(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else empty_ints()


class PlanBuilder:
    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that may still be computed in this step."""
        self.prompt_budget = budget
        """How many of them by rows that compute more than they sample from."""
        self.added_rows: list[AddedRow] = []
        self.preempted = False
        self.held_blocks: list[int] = []
        """Sources of copies, referenced until the plan is complete."""
        # Running rows come as arrays, admitted ones one by one; arrays are made of them at the end.
        self._rows: list[Int32Array] = []
        self._counts: list[Int32Array] = []
        self._samples: list[Int32Array] = []
        self._admitted: list[tuple[int, int, int]] = []
        self._block_rows: list[Int32Array] = []
        self._block_indices: list[Int32Array] = []
        self._block_groups: list[Int32Array] = []
        self._block_ids: list[Int32Array] = []
        self._tables: list[tuple[int, int, int, int]] = []
        self._table_ids: list[int] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def empty(self) -> bool:
        return not self._rows and not self._admitted

    def compute(self, rows: Int32Array, counts: Int32Array, samples: Int32Array) -> None:
        self._rows.append(rows)
        self._counts.append(counts)
        self._samples.append(samples)
        self.budget -= int(counts.sum())
        self.prompt_budget -= int(counts[counts > samples].sum())

    @property
    def room(self) -> int:
        """Tokens that a waiting request may still compute."""
        return min(self.budget, self.prompt_budget)

    def admit(self, added: AddedRow, count: int, samples: bool) -> None:
        """A new row, which computes `count` tokens at once."""
        self.added_rows.append(added)
        self._admitted.append((added.row, count, samples))
        self.budget -= count
        self.prompt_budget -= count

    def write_blocks(
        self, group: int, rows: Int32Array, indices: Int32Array, ids: Int32Array
    ) -> None:
        self._block_rows.append(rows)
        self._block_indices.append(indices)
        self._block_groups.append(np.full_like(ids, group))
        self._block_ids.append(ids)

    def write_table(self, group: int, row: int, first: int, ids: list[int]) -> None:
        """Entries of one row from index `first` on."""
        self._tables.append((group, row, first, len(ids)))
        self._table_ids += ids

    def copy_block(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def build(
        self, freed_rows: list[int], cuts: dict[int, int], appends: list[tuple[int, int]]
    ) -> StepPlan:
        self._gather_admitted()
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
            block_groups=_join(self._block_groups),
            block_ids=_join(self._block_ids),
            cut_rows=np.array(list(cuts), np.int32),
            cut_lengths=np.array(list(cuts.values()), np.int32),
            copy_sources=copies[:, 0],
            copy_targets=copies[:, 1],
            rows=_join(self._rows),
            num_new_tokens=_join(self._counts),
            num_samples=_join(self._samples),
        )

    def _gather_admitted(self) -> None:
        if not self._admitted:
            return
        rows, counts, samples = np.array(self._admitted, np.int32).T
        self._rows.append(rows)
        self._counts.append(counts)
        self._samples.append(samples)
        groups, rows, first, lengths = np.array(self._tables, np.int32).T
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(self._table_ids)) + np.repeat(first - starts, lengths)
        self._block_groups.append(np.repeat(groups, lengths))
        self._block_rows.append(np.repeat(rows, lengths))
        self._block_indices.append(places.astype(np.int32))
        self._block_ids.append(np.array(self._table_ids, np.int32))
