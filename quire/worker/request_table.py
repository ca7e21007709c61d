"""`RequestTable`: the device's record of running requests, one permanent row each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import AddedRow, Int32Array, StepPlan, empty_ints
from quire.worker.staging import Staging


@dataclass(slots=True)
class StagedRows:
    """The rows of a plan on the device."""

    append_rows: Tensor
    append_tokens: Tensor
    rows: Tensor
    counts: Tensor
    """New tokens of each row."""
    samples: Tensor
    """Which of `rows` sample, as indices."""
    sample_rows: Tensor
    copy_sources: Tensor
    copy_targets: Tensor


class RequestTable:
    """Rows hold the truth about lengths: positions and slots of a step are computed from them."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.device = device
        self.staging = Staging(device)
        self.block_size = block_size
        # Uninitialised: a row is read up to its length only, and may be very long.
        self.token_ids = torch.empty((max_rows, max_model_len), dtype=torch.int32, device=device)
        self.num_tokens = ints(max_rows)
        self.num_computed = ints(max_rows)
        self.block_tables = ints(1, max_rows, max_blocks)
        self.appends_sampled = torch.ones(max_rows, dtype=torch.bool, device=device)

    def update(self, plan: StepPlan) -> StagedRows:
        """Carry out the changes of a plan. All that the host sends travels in one copy."""
        samples = np.flatnonzero(plan.samples).astype(np.int32)
        added_fields, places, tokens = self._added(plan.added_rows)
        forks = [added for added in plan.added_rows if added.fork_of >= 0]
        sent = self.staging.send(
            np.array([[one.row, one.fork_of] for one in forks], np.int32).T,
            added_fields,
            places,
            tokens,
            plan.block_rows,
            plan.block_groups,
            plan.block_indices,
            plan.block_ids,
            append_places(plan.append_rows),
            plan.append_rows,
            plan.append_tokens,
            plan.rows,
            plan.num_new_tokens,
            samples,
            plan.rows[samples],
            plan.copy_sources,
            plan.copy_targets,
        )
        if forks:
            self._fork(sent[0].view(2, -1), max(one.num_forked_tokens for one in forks))
        if plan.added_rows:
            rows, totals, computed, appends = sent[1].view(4, -1)
            self.token_ids.view(-1)[sent[2].view(torch.int64)] = sent[3]
            self.num_tokens[rows] = totals
            self.num_computed[rows] = computed
            self.appends_sampled[rows] = appends.bool()
        if len(plan.append_rows):
            self._append(sent[9], sent[10], sent[8])
        if len(plan.block_rows):
            rows, groups, indices, ids = sent[4:8]
            self.block_tables[groups, rows, indices] = ids
        return StagedRows(*sent[9:])

    def _fork(self, pairs: Tensor, num_tokens: int) -> None:
        """Copy the beginning of rows `pairs[1]` to rows `pairs[0]`, for all as much as for the one
        that forks most; what is too much for others lies beyond what they read."""
        rows, parents = pairs
        num_blocks = num_tokens // self.block_size
        self.token_ids[rows, :num_tokens] = self.token_ids[parents, :num_tokens]
        self.block_tables[:, rows, :num_blocks] = self.block_tables[:, parents, :num_blocks]

    def _added(self, added: list[AddedRow]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """[row, tokens, computed tokens, appends] of each, and flat places of all their tokens,
        which are 64-bit: many rows of a very long length have more places than 32 bits count."""
        if not added:
            return empty_ints(), empty_ints(), empty_ints()
        fields = np.array(
            [
                (one.row, len(one.token_ids), one.num_computed_tokens, one.appends_sampled)
                for one in added
            ],
            np.int32,
        ).T
        rows, totals = fields[:2]
        forked = np.array([one.num_forked_tokens for one in added], np.int32)
        counts = totals - forked
        ends = np.cumsum(counts)
        first = rows.astype(np.int64) * self.token_ids.shape[1] + forked
        places = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
        tokens = np.concatenate([one.token_ids[one.num_forked_tokens :] for one in added])
        return fields, places.view(np.int32), tokens

    def _append(self, rows: Tensor, tokens: Tensor, places: Tensor) -> None:
        """Append known tokens; one of several for the same row has its place among them."""
        self.token_ids[rows, self.num_tokens[rows] + places] = tokens
        self.num_tokens.index_add_(0, rows, torch.ones_like(rows))

    def append_sampled(self, rows: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens where the sampler chooses; other rows keep their length."""
        if rows.is_cuda:
            from quire.kernels.triton.rows import append_tokens

            append_tokens(rows, tokens, self.token_ids, self.num_tokens, self.appends_sampled)
            return
        at, chosen = self.num_tokens[rows], self.appends_sampled[rows]
        current = self.token_ids[rows, at]
        self.token_ids[rows, at] = torch.where(chosen, tokens, current)
        self.num_tokens[rows] = at + chosen.int()


def append_places(rows: Int32Array) -> Int32Array:
    """For each entry, how many earlier ones name the same row. Those of a row are adjacent."""
    if not len(rows):
        return empty_ints()
    index = np.arange(len(rows))
    starts = np.where(np.append(True, rows[1:] != rows[:-1]), index, 0)
    return (index - np.maximum.accumulate(starts)).astype(np.int32)
