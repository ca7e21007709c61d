"""`RowTable`: the device's record of running sequences, one permanent row each."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.kernels import dispatch
from quire.kernels.torch.rows import DraftedRows
from quire.protocol.plan import AddedRow, Int32Array, StepPlan, empty_ints

ALIGNMENT = 4
"""Integers; Triton compiles a kernel anew for pointers that are not at multiples of 16 bytes."""


def aligned(count: int) -> int:
    """`count` integers and what must follow them before others may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Staging:
    """Host arrays to the device in one asynchronous copy from pinned memory; on a CPU nothing is
    copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, *arrays: Int32Array) -> list[Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array).ravel()) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += aligned(array.size)
        packed = torch.empty(end, dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.size] = array.ravel()
        # The allocator of pinned memory reuses it only after the copy is done.
        sent = packed.to(self.device, non_blocking=True)
        return [
            sent[start : start + array.size] for start, array in zip(starts, arrays, strict=True)
        ]

    def send_named(self, *groups: Mapping[str, Int32Array]) -> list[dict[str, Tensor]]:
        """As `send`, all groups in one copy; each comes back with its names."""
        sent = iter(self.send(*(array for group in groups for array in group.values())))
        return [{name: next(sent) for name in group} for group in groups]


@dataclass(slots=True)
class StagedRows:
    """The rows of a plan on the device."""

    lines: StagedLines | None
    """Only where drafts are verified; otherwise each of `sample_rows` has one line."""
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


@dataclass(slots=True)
class StagedLines:
    """The lines of logits of a plan that verifies drafts, on the device."""

    index: Tensor
    """Of each line, which of the rows that sample it belongs to."""
    offsets: Tensor
    """Drafts before each line."""
    tokens: Tensor
    """Which of the step's new tokens each line follows."""
    first: Tensor
    """Of each row that samples, its first line."""
    counts: Tensor
    """Lines of each row that samples."""


class RowTable:
    """Rows hold the truth about lengths: positions and slots of a step are computed from them.

    `num_drafts` drafts lie behind the known tokens of a row. Where a step computes more of them
    than there are, it computes what else lies there, which is never accepted.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.device = device
        self.staging = Staging(device)
        self.block_size = block_size
        # All that lies in a row is a token of the vocabulary.
        self.token_ids = _untouched_zeros(max_rows, max_model_len, device)
        # One block, so that a row is added in one launch.
        self._numbers = ints(5, aligned(max_rows))[:, :max_rows]
        self.num_tokens, self.num_computed, self.num_drafts, self.appends_sampled = self._numbers[
            :4
        ]
        self.adapter_slots = self._numbers[4]
        """-1: none."""
        self._host_slots = np.full(max_rows, -1, np.int32)
        self.block_tables = ints(num_groups, max_rows, max_blocks)
        self._had_drafts = False
        self.max_computed = np.zeros(max_rows, np.int32)
        """Bounds of `num_computed` on the host, behind the last plan."""

    def update(self, plan: StepPlan) -> StagedRows:
        """Carry out the changes of a plan. All that the host sends travels in one copy."""
        self._bound_lengths(plan)
        samples = np.flatnonzero(plan.samples).astype(np.int32)
        fields, places, tokens = self._added(plan.added_rows)
        forks = [added for added in plan.added_rows if added.fork_of >= 0]
        changes = {
            "forks": np.array([[one.row, one.fork_of] for one in forks], np.int32).T,
            "added_fields": fields,
            "added_places": places,
            "added_tokens": tokens,
            "block_rows": plan.block_rows,
            "block_groups": plan.block_groups,
            "block_indices": plan.block_indices,
            "block_ids": plan.block_ids,
            "append_places": append_places(plan.append_rows),
        }
        if len(plan.cut_rows):
            changes |= {"cut_rows": plan.cut_rows, "cut_lengths": plan.cut_lengths}
        computing = {
            "append_rows": plan.append_rows,
            "append_tokens": plan.append_tokens,
            "rows": plan.rows,
            "counts": plan.num_new_tokens,
            "samples": samples,
            "sample_rows": plan.rows[samples],
            "copy_sources": plan.copy_sources,
            "copy_targets": plan.copy_targets,
        }
        lines = _lines(plan) if plan.has_drafts else {}
        sent, sent_rows, sent_lines = self.staging.send_named(changes, computing, lines)
        staged = StagedRows(StagedLines(**sent_lines) if lines else None, **sent_rows)
        if forks:
            self._fork(sent["forks"].view(2, -1), max(one.num_forked_tokens for one in forks))
        if plan.added_rows:
            self.token_ids.view(-1)[sent["added_places"].view(torch.int64)] = sent["added_tokens"]
            numbers = sent["added_fields"].view(6, -1)
            self._numbers[:, numbers[0]] = numbers[1:]
        if len(plan.cut_rows):
            self._cut(sent["cut_rows"], sent["cut_lengths"])
        if len(plan.append_rows):
            self._append(staged.append_rows, staged.append_tokens, sent["append_places"])
        if len(plan.block_rows):
            at = sent["block_groups"], sent["block_rows"], sent["block_indices"]
            self.block_tables[at] = sent["block_ids"]
        return staged

    def beside(self, kv_group: int) -> RowTable:
        """The same rows with lengths of their own, and the blocks of one group, for a model that
        computes their tokens a second time."""
        other = copy(self)
        other.num_computed = torch.zeros_like(self.num_computed)
        other.block_tables = self.block_tables[kv_group : kv_group + 1]
        return other

    def used_adapters(self, plan: StepPlan) -> list[int]:
        """Slots of the adapters that rows of the plan use, which is carried out."""
        return [slot for slot in np.unique(self._host_slots[plan.rows]).tolist() if slot >= 0]

    def _bound_lengths(self, plan: StepPlan) -> None:
        bounds = self.max_computed
        for added in plan.added_rows:
            bounds[added.row] = added.num_computed_tokens
            self._host_slots[added.row] = added.adapter_slot
        if len(plan.cut_rows):
            bounds[plan.cut_rows] = np.minimum(bounds[plan.cut_rows], plan.cut_lengths - 1)
        grown = bounds[plan.rows] + plan.num_new_tokens  # as if all drafts were accepted
        bounds[plan.rows] = np.minimum(grown, self.token_ids.shape[1])

    def _fork(self, pairs: Tensor, num_tokens: int) -> None:
        """Copy the beginning of rows `pairs[1]` to rows `pairs[0]`, for all as much as for the one
        that forks most; what is too much for others lies beyond what they read."""
        rows, parents = pairs
        num_blocks = num_tokens // self.block_size
        self.token_ids[rows, :num_tokens] = self.token_ids[parents, :num_tokens]
        self.block_tables[:, rows, :num_blocks] = self.block_tables[:, parents, :num_blocks]

    def _added(self, added: list[AddedRow]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """[row, tokens, computed tokens, drafts, appends, adapter slot] of each, and flat places of
        all their tokens, which are 64-bit: many rows of a very long length have more places than 32
        bits count."""
        if not added:
            return empty_ints(), empty_ints(), empty_ints()
        fields = np.array(
            [
                (
                    one.row,
                    len(one.token_ids),
                    one.num_computed_tokens,
                    0,
                    one.appends_sampled,
                    one.adapter_slot,
                )
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
        if self._had_drafts:
            self.num_drafts[rows] = 0

    def _cut(self, rows: Tensor, lengths: Tensor) -> None:
        self.num_tokens[rows] = lengths
        self.num_computed[rows] = torch.minimum(self.num_computed[rows], lengths - 1)
        self.num_drafts[rows] = 0

    def append_sampled(self, rows: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens to the rows that take them; others keep their length."""
        if rows.is_cuda:
            from quire.kernels.triton.rows import append_tokens

            append_tokens(rows, tokens, self.token_ids, self.num_tokens, self.appends_sampled)
            return
        at, appends = self.num_tokens[rows], self.appends_sampled[rows].bool()
        current = self.token_ids[rows, at]
        self.token_ids[rows, at] = torch.where(appends, tokens, current)
        self.num_tokens[rows] = at + appends.int()

    def accept(self, rows: Tensor, lines: StagedLines, tokens: Tensor) -> Tensor:
        """Append the `tokens` sampled in the lines of `rows` while drafts agree; see
        `quire.kernels.torch.rows.accept_tokens`. Returns how many each row accepts."""
        return dispatch.accept_tokens(rows, lines.first, lines.counts, tokens, self._drafted)

    def write_drafts(self, rows: Tensor, drafts: Tensor) -> Tensor:
        """Put `drafts` (int32 [rows, k], the used ones first, then negative ones) behind the known
        tokens of `rows`, as many as fit. Returns how many wait in each."""
        self._had_drafts = True
        return dispatch.write_drafts(rows, drafts, self._drafted)

    def drafts(self, rows: Tensor, count: int) -> Tensor:
        """The `count` tokens that lie behind the known ones of each of `rows`; int32."""
        places = self.num_tokens[rows].long()[:, None] + torch.arange(count, device=self.device)
        # Near its end a row has fewer.
        return self.token_ids[rows[:, None], places.clamp_max_(self.token_ids.shape[1] - 1)]

    @cached_property
    def _drafted(self) -> DraftedRows:
        return DraftedRows(
            self.token_ids,
            self.num_tokens,
            self.num_computed,
            self.num_drafts,
            self.appends_sampled,
        )


def _untouched_zeros(num_rows: int, length: int, device: torch.device) -> Tensor:
    """int32 zeros which, on a CPU, take no memory before they are written to: rows may be long."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, length), np.int32))
    return torch.zeros((num_rows, length), dtype=torch.int32, device=device)


def _lines(plan: StepPlan) -> dict[str, Int32Array]:
    """The parts of `StagedLines`."""
    counts = plan.num_samples[plan.samples]
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return {
        "index": index,
        "offsets": plan.line_offsets,
        "tokens": plan.line_tokens,
        "first": plan.first_lines,
        "counts": counts,
    }


def append_places(rows: Int32Array) -> Int32Array:
    """For each entry, how many earlier ones name the same row. Those of a row are adjacent."""
    if not len(rows):
        return empty_ints()
    index = np.arange(len(rows))
    starts = np.where(np.append(True, rows[1:] != rows[:-1]), index, 0)
    return (index - np.maximum.accumulate(starts)).astype(np.int32)
