"""`DecodeGraphs`: steps of one token for each row as CUDA graphs, one per batch size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.rows import RowTensors, TokenTensors, gather_decode
from quire.layers.attention.backend import AttentionInputs
from quire.layers.attention.groups import GroupedAttention
from quire.layers.attention.shared_prefix import HostPrefixTiles
from quire.layers.step import StepContext
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array, empty_ints
from quire.worker.batch import slots_of
from quire.worker.graph_inputs import GraphInputs
from quire.worker.request_table import RequestTable


class DecodeKey(NamedTuple):
    """The shape of a graph."""

    num_tokens: int
    """One for each row."""
    shares_prefixes: bool
    """Whether a shared prefix is read once."""


PREFIX_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Batch sizes of graphs that read a shared prefix once."""


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, up to all rows."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)}
    sizes |= set(range(576, max_rows + 1, 64)) | {max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class DecodeGraphs:
    """A graph gathers the batch from the rows itself, so a replay needs the row numbers and, where
    rows share a prefix, the tiles of those. Its output, the logits, is valid until the next replay.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RequestTable,
        max_rows: int,
        shares_prefixes: bool,
        logits: Tensor,
    ) -> None:
        self.model, self.attention, self.table = model, attention, table
        self.sizes = graph_sizes(max_rows)
        self.prefix_sizes: list[int] = []
        if shares_prefixes:
            largest = self.sizes[-1]
            self.prefix_sizes = sorted({*(s for s in PREFIX_SIZES if s < largest), largest})
        device = table.device
        self._inputs = GraphInputs(max_rows, attention.prefix_members, shares_prefixes, device)
        self._leading, *self._others = table.block_tables
        self._rows = RowTensors(table.token_ids, table.num_computed, self._leading)
        self._tokens = TokenTensors.zeros(max_rows, device)
        self._lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._logits = logits
        self._graphs: dict[DecodeKey, torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[DecodeKey]:
        keys = [DecodeKey(size, False) for size in self.sizes]
        return keys + [DecodeKey(size, True) for size in self.prefix_sizes]

    def prepare(self, key: DecodeKey) -> None:
        """Inputs for the capture: nothing but padding."""
        size, shares_prefixes = key
        self._inputs.send(size, empty_ints(), shares_prefixes)

    def forward(self, key: DecodeKey) -> None:
        size, shares_prefixes = key
        rows, tokens, lens = self._inputs.rows(size), self._tokens.first(size), self._lens[:size]
        gather_decode(rows, self._rows, self.table.block_size, tokens, lens)
        used = rows.clamp(min=0)
        slots = [tokens.slots]
        for blocks in self._others:
            found = slots_of(blocks, used, tokens.positions, self.table.block_size)
            slots.append(torch.where(tokens.slots < 0, tokens.slots, found))
        attention = self.attention.plan(
            [
                AttentionInputs(
                    query_start=self._query_start[:size],
                    context_lens=lens,
                    block_tables=blocks.index_select(0, used),
                    slots=own,
                    query_lens=np.ones(size, np.int32),
                    send=self.table.staging.send,
                    prefixes=self._inputs.prefixes(size) if shares_prefixes else None,
                )
                for blocks, own in zip((self._leading, *self._others), slots, strict=True)
            ]
        )
        hidden = self.model(StepContext(tokens.positions, attention, tokens.ids))
        self.model.logits(hidden, out=self._logits[:size])

    def add(self, key: DecodeKey, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs[key] = graph

    def find(self, num_rows: int, shares_prefixes: bool) -> DecodeKey | None:
        """The graph that a batch fits into, if any."""
        sizes = self.prefix_sizes if shares_prefixes else self.sizes
        size = next((size for size in sizes if size >= num_rows), None)
        return None if size is None else DecodeKey(size, shares_prefixes)

    def run(self, key: DecodeKey, rows: Int32Array, prefixes: HostPrefixTiles | None) -> Tensor:
        """Logits of the next token for each row."""
        size, shares_prefixes = key
        self._inputs.send(size, rows, shares_prefixes, prefixes)
        self._graphs[key].replay()
        return self._logits[: len(rows)]
