"""`MixedGraphs`: steps with a few prompts among the rows as CUDA graphs, one per number of tokens.

Launching the kernels of such a step one by one takes the host longer than a GPU needs for some
hundred tokens, and the requests that decode next to the prompts would wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.rows import RowTensors, TokenTensors, gather_mixed
from quire.layers.attention.backend import AttentionBackend, AttentionInputs, DividedRows
from quire.layers.attention.triton import query_tiles
from quire.layers.step import StepContext
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array, StepPlan, empty_ints
from quire.worker.request_table import RequestTable
from quire.worker.staging import aligned

TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Numbers of tokens to capture. From there on the GPU takes longer than the launches."""
MAX_ROWS = 256
MAX_PROMPTS = 16
"""Rows with several new tokens."""


class _Host(NamedTuple):
    """What a replay is told. Request N, behind the last, stands for unused tiles: it has no query
    and a context of one token."""

    rows: Int32Array
    """Of N + 1 requests; -1 pads."""
    starts: Int32Array
    """First tokens of N + 2 requests."""
    samples: Int32Array
    """Tokens whose logits are wanted, of N."""
    tile_requests: Int32Array
    tile_indices: Int32Array


class MixedGraphs:
    """Graphs of up to so many tokens less one: the last is nobody's, and padding names it."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        table: RequestTable,
        max_rows: int,
        max_tokens: int,
        logits: Tensor,
    ) -> None:
        self.model, self.attention, self.table = model, attention, table
        self._max_rows, self._logits = min(max_rows, MAX_ROWS), logits
        self.sizes = [size for size in TOKENS if size // 2 < max_tokens]
        device, most = table.device, max(self.sizes, default=0)
        lengths = sum(aligned(n) for n in self._lengths(most)) if most else 0
        self._inputs = torch.zeros(lengths, dtype=torch.int32, device=device)
        self._rows = RowTensors(table.token_ids, table.num_computed, table.block_tables[0])
        self._tokens = TokenTensors.zeros(most, device)
        self._lens, self._single_tokens, self._single_lens = torch.zeros(
            3, aligned(self._max_rows + 1), dtype=torch.int32, device=device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _num_rows(self, size: int) -> int:
        return min(self._max_rows, size // 2)

    def _lengths(self, size: int) -> tuple[int, ...]:
        """Of the parts of `_Host`."""
        rows = self._num_rows(size)
        tiles = -(-size // self.attention.tile_queries) + MAX_PROMPTS
        return rows + 1, rows + 2, rows, tiles, tiles

    def prepare(self, size: int) -> None:
        """Inputs for the capture: nothing but padding."""
        self._send(size, empty_ints(), empty_ints(), empty_ints())

    def forward(self, size: int) -> None:
        tokens, num_rows = self._tokens.first(size), self._num_rows(size)
        parts, start = [], 0
        for length in self._lengths(size):
            parts.append(self._inputs[start : start + length])
            start += aligned(length)
        rows, starts, samples, tile_requests, tile_indices = parts
        gather_mixed(
            rows[:num_rows],
            starts,
            self._rows,
            self.table.block_size,
            tokens,
            self._lens,
            self._single_tokens,
            self._single_lens,
        )
        attention = self.attention.plan(
            AttentionInputs(
                query_start=starts,
                context_lens=self._lens[: num_rows + 1],
                block_tables=self._rows.block_tables.index_select(0, rows.clamp(min=0)),
                slots=tokens.slots,
                query_lens=empty_ints(),
                send=self.table.staging.send,
                divided=DividedRows(
                    self._single_tokens[:num_rows],
                    self._single_lens[:num_rows],
                    tile_requests,
                    tile_indices,
                ),
            )
        )
        hidden = self.model(StepContext(tokens.positions, (attention,), tokens.ids))
        self.model.logits(hidden.index_select(0, samples), out=self._logits[:num_rows])

    def add(self, size: int, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs[size] = graph

    def find(self, plan: StepPlan) -> int | None:
        """The graph that a step fits into, if any."""
        if int((plan.num_new_tokens > 1).sum()) > MAX_PROMPTS:
            return None
        for size in self.sizes:
            if plan.num_tokens < size and len(plan.rows) <= self._num_rows(size):
                return size
        return None

    def run(self, size: int, plan: StepPlan) -> Tensor:
        """Logits of the rows that sample."""
        sampled = np.cumsum(plan.num_new_tokens)[plan.samples] - 1
        self._send(size, plan.rows, plan.num_new_tokens, sampled)
        self._graphs[size].replay()
        return self._logits[: len(sampled)]

    def _send(self, size: int, rows: Int32Array, counts: Int32Array, sampled: Int32Array) -> None:
        lengths = self._lengths(size)
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
        host.samples[: len(sampled)], host.samples[len(sampled) :] = sampled, size - 1
        requests, indices = query_tiles(counts, self.attention.tile_queries)
        host.tile_requests[: len(requests)] = requests
        host.tile_requests[len(requests) :] = self._num_rows(size)
        host.tile_indices[: len(indices)], host.tile_indices[len(indices) :] = indices, 0
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
