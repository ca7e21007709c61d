"""`GroupedAttention`: the attention backends of a model, one for each KV group."""

from __future__ import annotations

from collections.abc import Sequence

from quire.layers.attention.backend import AttentionBackend, AttentionInputs, AttentionStep


class GroupedAttention:
    """Backends may differ between groups; what steps are cut into fits all of them."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self.backends = tuple(backends)
        tiles = {backend.tile_queries for backend in self.backends}
        assert len(tiles) == 1, "tiles are the same for all groups"
        (self.tile_queries,) = tiles
        """Queries of a request that go into one tile; 0: there are no tiles."""
        self.max_decode_queries = min(backend.max_decode_queries for backend in self.backends)
        self.prefix_members = min(backend.prefix_members for backend in self.backends)
        """Requests whose queries of a shared prefix go into one tile."""

    @property
    def prefill_names(self) -> list[str]:
        """Which kernels attend with prompts, where there are several."""
        names = (backend.prefill_name for backend in self.backends)
        return list(dict.fromkeys(name for name in names if name is not None))

    def plan(self, inputs: Sequence[AttentionInputs]) -> tuple[AttentionStep, ...]:
        """Does the host work of a step, once for all layers; `inputs` are those of each group."""
        return tuple(backend.plan(one) for backend, one in zip(self.backends, inputs, strict=True))
