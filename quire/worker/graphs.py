"""`DecodeGraphs`: the forward pass of decode steps as CUDA graphs, one per batch size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.rows import gather_decode
from quire.layers.attention.backend import AttentionBackend, AttentionInputs
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array
from quire.worker.request_table import RequestTable


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, up to all rows."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)}
    sizes |= set(range(576, max_rows + 1, 64)) | {max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class DecodeGraphs:
    """Owns the static buffers, captures once at start-up, pads and replays.

    A graph gathers the batch from the rows itself, so a replay needs the row numbers and nothing
    else. Its output, the logits, is valid until the next replay.
    """

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, table: RequestTable, max_rows: int
    ) -> None:
        self.model, self.attention, self.table = model, attention, table
        self.sizes = graph_sizes(max_rows)
        device = table.device

        def buffer(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        self._rows = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._slots = (buffer(torch.int64) for _ in range(3))
        self._lens = buffer(torch.int32)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # One for all graphs: each would keep logits of its own alive, gigabytes in all.
        self._logits = model.new_logits(max_rows)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, sizes: list[int]) -> None:
        """Capture some sizes, the largest first so that the others fit into its memory."""
        for size in reversed(sizes):
            self._forward(size)  # compiles kernels and sets up libraries outside of the graph
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._forward(size)
            self._graphs[size] = graph
        torch.cuda.synchronize()

    def _forward(self, size: int) -> None:
        table = self.table
        rows, lens = self._rows[:size], self._lens[:size]
        gather_decode(
            rows,
            table.token_ids,
            table.num_computed,
            table.block_tables[0],
            table.block_size,
            self._tokens[:size],
            self._positions[:size],
            self._slots[:size],
            lens,
        )
        step = self.attention.plan(
            AttentionInputs(
                query_start=self._query_start[:size],
                context_lens=lens,
                block_tables=table.block_tables[0].index_select(0, rows.clamp(min=0)),
                slots=self._slots[:size],
                query_lens=np.ones(size, np.int32),
                send=table.staging.send,
            )
        )
        hidden = self.model(self._tokens[:size], self._positions[:size], step)
        self.model.logits(hidden, out=self._logits[:size])

    def fits(self, num_rows: int) -> bool:
        return num_rows <= self.sizes[-1]

    def run(self, rows: Int32Array) -> Tensor:
        """Logits of the next token for each row."""
        size = next(size for size in self.sizes if size >= len(rows))
        padded = np.full(size, -1, np.int32)
        padded[: len(rows)] = rows
        pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = padded
        self._rows[:size].copy_(pinned, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[: len(rows)]
