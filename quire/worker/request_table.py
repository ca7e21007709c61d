"""`RequestTable`: the device's record of running requests, one permanent row each."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.protocol.plan import AddedRow, Int32Array, StepPlan


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
        self.device = device
        self.block_size = block_size
        # Uninitialised: a row is read up to its length only, and may be very long.
        self.token_ids = torch.empty((max_rows, max_model_len), dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((1, max_rows, max_blocks), dtype=torch.int32, device=device)
        self.appends_sampled = torch.ones(max_rows, dtype=torch.bool, device=device)

    def index(self, values: Int32Array) -> Tensor:
        """Host integers as an index tensor on the device."""
        return torch.from_numpy(values).to(self.device, torch.int64)

    def update(self, plan: StepPlan) -> None:
        """Carry out the changes of a plan."""
        for added in plan.added_rows:
            self._add(added)
        if len(plan.append_rows):
            self.append(self.index(plan.append_rows), torch.from_numpy(plan.append_tokens))
        if len(plan.block_rows):
            rows, indices = self.index(plan.block_rows), self.index(plan.block_indices)
            ids = torch.from_numpy(plan.block_ids).to(self.device)
            self.block_tables[:, rows, indices] = ids

    def _add(self, added: AddedRow) -> None:
        row, forked = added.row, added.num_forked_tokens
        if added.fork_of >= 0:
            full = forked // self.block_size
            self.token_ids[row, :forked] = self.token_ids[added.fork_of, :forked]
            self.block_tables[:, row, :full] = self.block_tables[:, added.fork_of, :full]
        total = forked + len(added.token_ids)
        self.token_ids[row, forked:total] = torch.from_numpy(added.token_ids).to(self.device)
        self.num_tokens[row] = total
        self.num_computed[row] = added.num_computed_tokens
        self.appends_sampled[row] = added.appends_sampled

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Append one token to each row."""
        at = self.num_tokens[rows]
        self.token_ids[rows, at.long()] = tokens.to(self.device, torch.int32)
        self.num_tokens[rows] = at + 1

    def append_sampled(self, rows: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens where the sampler chooses; other rows keep their length."""
        at, chosen = self.num_tokens[rows], self.appends_sampled[rows]
        current = self.token_ids[rows, at.long()]
        self.token_ids[rows, at.long()] = torch.where(chosen, tokens.to(torch.int32), current)
        self.num_tokens[rows] = at + chosen.to(torch.int32)
