"""`MixedGraphs`: steps in which rows have several tokens as CUDA graphs, of several shapes each.

Launching the kernels of such a step one by one takes the host longer than a GPU needs for some
hundred tokens, and the requests that decode next to prompts would wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.rows import RowTensors, TokenTensors, gather_mixed
from quire.layers.attention.backend import AttentionInputs, DividedRows
from quire.layers.attention.groups import GroupedAttention
from quire.layers.attention.triton import query_tiles
from quire.layers.step import StepContext
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array, StepPlan, empty_ints
from quire.worker.batch import slots_of
from quire.worker.request_table import RequestTable
from quire.worker.staging import aligned
from quire.worker.warm_up import drafted_counts

TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Numbers of tokens to capture. From there on the GPU takes longer than the launches."""
MAX_ROWS = 256
MAX_PROMPTS = 16
"""Rows with more new tokens than decode attention takes."""
DRAFTED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows to capture for steps in which each has a few tokens, and none has more."""


class MixedKey(NamedTuple):
    """The shape of a graph."""

    num_tokens: int
    num_rows: int
    queries: int
    """Rows with up to so many tokens are for decode attention."""
    num_prompts: int
    """Most rows with more."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step. Where decode attention takes single ones, the last belongs to no
        row, and padding names it."""
        return self.num_tokens - 1 if self.queries == 1 else self.num_tokens

    @property
    def num_lines(self) -> int:
        """Most lines of logits."""
        return min(self.num_tokens, self.num_rows * self.queries)


def mixed_keys(max_rows: int, max_tokens: int, max_queries: int) -> list[MixedKey]:
    """What to capture. Where rows have up to `max_queries` tokens when drafts are verified, steps
    with prompts are there twice, so that the others cost the same with and without speculation."""
    most = 1 << (max_queries - 1).bit_length()
    max_rows = min(max_rows, MAX_ROWS)
    keys = [
        MixedKey(size, min(max_rows, size // 2), queries, MAX_PROMPTS)
        for queries in sorted({1, most})
        for size in TOKENS
    ]
    rows = sorted({*(count for count in DRAFTED_ROWS if count < max_rows), max_rows})
    for each in drafted_counts(max_queries):
        queries = 1 << (each - 1).bit_length()
        keys += [MixedKey(count * each, count, queries, 0) for count in rows]
    return [key for key in keys if key.num_tokens // 2 < max_tokens]


class _Host(NamedTuple):
    """What a replay is told. Request N, behind the last, stands for unused tiles: it has no query
    and a context of one token."""

    rows: Int32Array
    """Of N + 1 requests; -1 pads."""
    starts: Int32Array
    """First tokens of N + 2 requests."""
    lines: Int32Array
    """Tokens whose logits are wanted."""
    tile_requests: Int32Array
    tile_indices: Int32Array


class MixedGraphs:
    """A graph gathers the batch from the rows itself; logits are valid until the next replay."""

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RequestTable,
        keys: list[MixedKey],
        logits: Tensor,
    ) -> None:
        self.model, self.attention, self.table, self.keys = model, attention, table, keys
        self._logits = logits
        device, most = table.device, max((key.num_tokens for key in keys), default=0)
        lengths = [sum(map(aligned, self._lengths(key))) for key in keys]
        self._inputs = torch.zeros(max(lengths, default=0), dtype=torch.int32, device=device)
        self._leading, *self._others = table.block_tables
        self._rows = RowTensors(table.token_ids, table.num_computed, self._leading)
        self._tokens = TokenTensors.zeros(most, device)
        max_rows = max((key.num_rows for key in keys), default=0)
        self._lens, self._single_tokens, self._single_lens = torch.zeros(
            3, aligned(max_rows + 1), dtype=torch.int32, device=device
        )
        # The smallest first; steps that verify drafts leave graphs for single tokens to others.
        by_size = sorted(keys, key=lambda key: (key.num_tokens, key.num_prompts, key.queries))
        self._plain_order = sorted(by_size, key=lambda key: key.queries > 1)
        self._draft_order = sorted(by_size, key=lambda key: key.queries == 1)
        self._graphs: dict[MixedKey, torch.cuda.CUDAGraph] = {}

    def _lengths(self, key: MixedKey) -> tuple[int, ...]:
        """Of the parts of `_Host`."""
        rows, tiles = key.num_rows, 0
        if key.num_prompts:
            tiles = -(-key.num_tokens // self.attention.tile_queries) + key.num_prompts
        return rows + 1, rows + 2, key.num_lines, tiles, tiles

    def prepare(self, key: MixedKey) -> None:
        """Inputs for the capture: nothing but padding."""
        self._send(key, empty_ints(), empty_ints(), empty_ints())

    def forward(self, key: MixedKey) -> None:
        tokens, num_rows = self._tokens.first(key.num_tokens), key.num_rows
        parts, start = [], 0
        for length in self._lengths(key):
            parts.append(self._inputs[start : start + length])
            start += aligned(length)
        rows, starts, lines, *tiles = parts
        gather_mixed(
            rows[:num_rows],
            starts,
            self._rows,
            self.table.block_size,
            tokens,
            self._lens,
            (self._single_tokens, self._single_lens) if key.queries == 1 else None,
        )
        inputs = [self._attention_inputs(key, self._leading, tokens.slots, rows, starts, tiles)]
        if self._others:
            places = torch.arange(key.num_tokens, dtype=torch.int32, device=rows.device)
            requests = torch.searchsorted(starts[1 : num_rows + 1], places, right=True)
            rows_of = rows[:num_rows].index_select(0, requests.clamp(max=num_rows - 1)).clamp(min=0)
            for blocks in self._others:
                found = slots_of(blocks, rows_of, tokens.positions, self.table.block_size)
                slots = torch.where(tokens.slots < 0, tokens.slots, found)
                inputs.append(self._attention_inputs(key, blocks, slots, rows, starts, tiles))
        attention = self.attention.plan(inputs)
        hidden = self.model(StepContext(tokens.positions, attention, tokens.ids))
        self.model.logits(hidden.index_select(0, lines), out=self._logits[: len(lines)])

    def _attention_inputs(
        self,
        key: MixedKey,
        blocks: Tensor,
        slots: Tensor,
        rows: Tensor,
        starts: Tensor,
        tiles: list[Tensor],
    ) -> AttentionInputs:
        count, divided = key.num_rows, None
        if key.queries == 1:
            single = (self._single_tokens[:count], self._single_lens[:count])
            divided = DividedRows(*single, *tiles)
        elif key.num_prompts:
            divided = DividedRows(starts[: count + 1], self._lens[:count], *tiles)
        num_requests = count + (divided is not None)  # with the one for unused tiles
        rows = rows[:num_requests]
        return AttentionInputs(
            query_start=starts[: num_requests + 1],
            context_lens=self._lens[:num_requests],
            block_tables=blocks.index_select(0, rows.clamp(min=0)),
            slots=slots,
            query_lens=np.full(count, key.queries, np.int32),
            send=self.table.staging.send,
            divided=divided,
            decode_queries=key.queries,
        )

    def add(self, key: MixedKey, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs[key] = graph

    def find(self, plan: StepPlan) -> MixedKey | None:
        """The graph that a step fits into, if any."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        num_lines = int(plan.num_samples.sum())
        prompts: dict[int, int] = {}
        for key in self._draft_order if plan.has_drafts else self._plain_order:
            if num_tokens > key.max_tokens or num_rows > key.num_rows or num_lines > key.num_lines:
                continue
            if key.queries not in prompts:
                prompts[key.queries] = int((plan.num_new_tokens > key.queries).sum())
            if prompts[key.queries] <= key.num_prompts:
                return key
        return None

    def run(self, key: MixedKey, plan: StepPlan) -> Tensor:
        """The step's lines of logits."""
        lines = plan.line_tokens
        self._send(key, plan.rows, plan.num_new_tokens, lines)
        self._graphs[key].replay()
        return self._logits[: len(lines)]

    def _send(self, key: MixedKey, rows: Int32Array, counts: Int32Array, lines: Int32Array) -> None:
        lengths = self._lengths(key)
        packed = torch.empty(
            sum(aligned(n) for n in lengths), dtype=torch.int32, pin_memory=self._inputs.is_cuda
        )
        buffer, parts, start = packed.numpy(), [], 0
        for length in lengths:
            parts.append(buffer[start : start + length])
            start += aligned(length)
        host = _Host(*parts)
        host.rows[: len(rows)], host.rows[len(rows) :] = rows, -1
        host.starts[0] = 0
        host.starts[1 : len(rows) + 1] = np.cumsum(counts)
        host.starts[len(rows) + 1 :] = counts.sum()
        host.lines[: len(lines)], host.lines[len(lines) :] = lines, key.num_tokens - 1
        if key.num_prompts:
            requests, indices = query_tiles(counts, self.attention.tile_queries, key.queries)
            host.tile_requests[: len(requests)] = requests
            host.tile_requests[len(requests) :] = key.num_rows
            host.tile_indices[: len(indices)], host.tile_indices[len(indices) :] = indices, 0
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
