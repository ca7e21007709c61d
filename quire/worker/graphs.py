"""`StepGraphs`: forward passes as CUDA graphs, captured once at start-up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.layers.attention.backend import AttentionBackend
from quire.layers.attention.shared_prefix import HostPrefixTiles
from quire.models.registry import CausalLM
from quire.protocol.plan import StepPlan
from quire.worker.decode_graphs import DecodeGraphs, DecodeKey
from quire.worker.mixed_graphs import MixedGraphs
from quire.worker.request_table import RequestTable, StagedRows


class GraphKey(NamedTuple):
    num_tokens: int
    """What it is captured for."""
    decode: DecodeKey | None
    """None: a step with prompts."""


class StepGraphs:
    """Owns the memory of all graphs, captures them, and replays the one that a step fits into.

    The logits that a replay leaves are valid until the next one.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        table: RequestTable,
        max_rows: int,
        max_tokens: int,
        shares_prefixes: bool = False,
    ) -> None:
        # One for all graphs: each would keep logits of its own alive, gigabytes in all.
        logits = model.new_logits(max_rows)
        self._decode = DecodeGraphs(model, attention, table, max_rows, shares_prefixes, logits)
        self._mixed = MixedGraphs(model, attention, table, max_rows, max_tokens, logits)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def keys(self) -> list[GraphKey]:
        """All graphs, the largest first so that the others fit into its memory."""
        keys = [GraphKey(size, (size, shares)) for size, shares in self._decode.keys]
        keys += [GraphKey(size, None) for size in self._mixed.sizes]
        return sorted(keys, key=lambda key: key.num_tokens, reverse=True)

    @property
    def max_mixed_tokens(self) -> int:
        """Most tokens of a step with prompts that is one replay."""
        return max(self._mixed.sizes, default=1) - 1

    def compile(self) -> None:
        """Go through one graph of each kind, so that its kernels are compiled."""
        kinds = {(key.decode is None, key.decode and key.decode[1]): key for key in self.keys}
        for key in kinds.values():
            self._prepare(key)
            self._forward(key)

    def capture(self, keys: list[GraphKey]) -> None:
        for key in keys:
            self._prepare(key)
            self._forward(key)  # compiles kernels and sets up libraries outside of the graph
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._forward(key)
            if key.decode is not None:
                self._decode.add(key.decode, graph)
            else:
                self._mixed.add(key.num_tokens, graph)
        torch.cuda.synchronize()

    def _prepare(self, key: GraphKey) -> None:
        if key.decode is not None:
            self._decode.prepare(key.decode)
        else:
            self._mixed.prepare(key.num_tokens)

    def _forward(self, key: GraphKey) -> None:
        if key.decode is not None:
            self._decode.forward(key.decode)
        else:
            self._mixed.forward(key.num_tokens)

    def run(
        self, plan: StepPlan, staged: StagedRows, prefixes: HostPrefixTiles | None
    ) -> Tensor | None:
        """Logits of the rows that sample, or None where no graph fits."""
        if plan.num_tokens == len(plan.rows):
            key = self._decode.find(len(plan.rows), prefixes is not None)
            if key is None:
                return None
            logits = self._decode.run(key, plan.rows, prefixes)
            return logits if plan.samples.all() else logits[staged.samples]
        size = self._mixed.find(plan) if prefixes is None else None
        return None if size is None else self._mixed.run(size, plan)
