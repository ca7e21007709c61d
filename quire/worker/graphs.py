"""`StepGraphs`: forward passes as CUDA graphs, captured once at start-up."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.attention.groups import GroupedAttention
from quire.layers.attention.shared_prefix import HostPrefixTiles
from quire.models.registry import CausalLM
from quire.protocol.plan import StepPlan
from quire.worker.decode_graphs import DecodeGraphs, DecodeKey
from quire.worker.mixed_graphs import MixedGraphs, MixedKey, mixed_keys
from quire.worker.request_table import RequestTable, StagedRows

GraphKey = DecodeKey | MixedKey


class StepGraphs:
    """Owns the memory of all graphs, captures them, and replays the one that a step fits into.

    The logits that a replay leaves are valid until the next one.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RequestTable,
        max_rows: int,
        max_tokens: int,
        shares_prefixes: bool = False,
        max_queries: int = 1,
    ) -> None:
        """`max_queries` is 1 and the most drafts of a row."""
        mixed = mixed_keys(max_rows, max_tokens, min(max_queries, attention.max_decode_queries))
        # One for all graphs: each would keep logits of its own alive, gigabytes in all.
        logits = model.new_logits(max([max_rows, *(key.num_lines for key in mixed)]))
        self._decode = DecodeGraphs(model, attention, table, max_rows, shares_prefixes, logits)
        self._mixed = MixedGraphs(model, attention, table, mixed, logits)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def keys(self) -> list[GraphKey]:
        """All graphs, the largest first so that the others fit into its memory."""
        keys: list[GraphKey] = [*self._decode.keys, *self._mixed.keys]
        return sorted(keys, key=lambda key: key.num_tokens, reverse=True)

    @property
    def max_mixed_tokens(self) -> int:
        """Most tokens of a step with prompts that is one replay."""
        return max((key.max_tokens for key in self._mixed.keys if key.queries == 1), default=0)

    def compile(self) -> None:
        """Go through one graph of each kind, so that its kernels are compiled."""
        kinds: dict[tuple[int, ...], GraphKey] = {}
        for key in self.keys:
            if isinstance(key, DecodeKey):
                kinds[key.shares_prefixes,] = key
            else:
                kinds[key.queries, key.num_prompts] = key
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
            if isinstance(key, DecodeKey):
                self._decode.add(key, graph)
            else:
                self._mixed.add(key, graph)
        torch.cuda.synchronize()

    def _prepare(self, key: GraphKey) -> None:
        if isinstance(key, DecodeKey):
            self._decode.prepare(key)
        else:
            self._mixed.prepare(key)

    def _forward(self, key: GraphKey) -> None:
        if isinstance(key, DecodeKey):
            self._decode.forward(key)
        else:
            self._mixed.forward(key)

    def run(
        self, plan: StepPlan, staged: StagedRows, prefixes: HostPrefixTiles | None
    ) -> Tensor | None:
        """The step's lines of logits, or None where no graph fits."""
        if plan.num_tokens == len(plan.rows):
            key = self._decode.find(len(plan.rows), prefixes is not None)
            if key is None:
                return None
            logits = self._decode.run(key, plan.rows, prefixes)
            return logits if plan.samples.all() else logits[staged.samples]
        fits = self._mixed.find(plan) if prefixes is None else None
        return None if fits is None else self._mixed.run(fits, plan)
