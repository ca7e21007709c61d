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
        for added in plan.added_rows:
            if added.fork_of >= 0:
                self._fork(added)
        samples = np.flatnonzero(plan.samples).astype(np.int32)
        added_fields, places, tokens = self._added(plan.added_rows)
        sent = self.staging.send(
            added_fields,
            places,
            tokens,
            plan.append_rows,
            plan.append_tokens,
            plan.block_rows,
            plan.block_indices,
            plan.block_ids,
            plan.rows,
            plan.num_new_tokens,
            samples,
            plan.rows[samples],
            plan.copy_sources,
            plan.copy_targets,
        )
        if plan.added_rows:
            rows, totals, computed, appends = sent[0].view(4, -1)
            self.token_ids.view(-1)[sent[1]] = sent[2]
            self.num_tokens[rows] = totals
            self.num_computed[rows] = computed
            self.appends_sampled[rows] = appends.bool()
        if len(plan.append_rows):
            self.append(sent[3], sent[4])
        if len(plan.block_rows):
            self.block_tables[:, sent[5], sent[6]] = sent[7].view(plan.block_ids.shape)
        return StagedRows(*sent[8:])

    def _fork(self, added: AddedRow) -> None:
        forked, full = added.num_forked_tokens, added.num_forked_tokens // self.block_size
        self.token_ids[added.row, :forked] = self.token_ids[added.fork_of, :forked]
        self.block_tables[:, added.row, :full] = self.block_tables[:, added.fork_of, :full]

    def _added(self, added: list[AddedRow]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """[row, tokens, computed tokens, appends] of each, and flat places of all their tokens."""
        if not added:
            return empty_ints(), empty_ints(), empty_ints()
        width = self.token_ids.shape[1]
        totals = [one.num_forked_tokens + len(one.token_ids) for one in added]
        fields = np.array(
            [
                [one.row for one in added],
                totals,
                [one.num_computed_tokens for one in added],
                [one.appends_sampled for one in added],
            ],
            np.int32,
        )
        places = [
            np.arange(one.row * width + one.num_forked_tokens, one.row * width + total)
            for one, total in zip(added, totals, strict=True)
        ]
        tokens = np.concatenate([one.token_ids for one in added])
        return fields, np.concatenate(places).astype(np.int32), tokens

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Append one token to each row."""
        at = self.num_tokens[rows]
        self.token_ids[rows, at] = tokens
        self.num_tokens[rows] = at + 1

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
