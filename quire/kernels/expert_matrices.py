"""Matrices of all experts of a layer, as layers hand them to the kernels of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.config.experts import ClampedGate
from quire.kernels.torch.experts import Routing


@dataclass(frozen=True)
class ExpertTiles:
    """The work of a layer, tile by tile, of experts from number `first_expert` on."""

    tiles: Tensor
    """int32 [3, tiles]: an expert, counted from the first one, the place of its first pair and the
    end of its pairs; -1 for the expert where there is nothing to do. Without `pairs`, numbers of
    experts [tiles]."""
    pairs: Tensor | None
    """int32 [pairs], sorted by expert; the end is undefined where some were left out. None: a tile
    is a pair."""
    num_pairs: int
    first_expert: int
    size: int
    """Most pairs of a tile, a power of two from 16 on."""

    @property
    def count(self) -> int:
        return self.tiles.shape[-1]


class ExpertMatrices(Protocol):
    """A matrix [outputs, inputs] for each expert of a rank, in one format."""

    @property
    def num_experts(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def layout(self) -> object:
        """Equal where the same kernels take the matrices."""
        ...

    @property
    def max_tile(self) -> int:
        """Most pairs of a tile."""
        ...

    @property
    def takes_vectors(self) -> bool:
        """Whether few tokens have kernels of their own."""
        ...

    def gate_vectors(
        self,
        x: Tensor,
        routing: Routing,
        first_expert: int,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        """x [tokens, hidden] -> what the gate leaves for each pair [pairs, width]."""
        ...

    def sum_vectors(
        self, inner: Tensor, routing: Routing, first_expert: int, bias: Tensor | None
    ) -> Tensor:
        """inner [pairs, width] -> the weighted sum of each token's experts [tokens, hidden]."""
        ...

    def gate_tiles(
        self,
        x: Tensor,
        top_k: int,
        tiles: ExpertTiles,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        """As `gate_vectors`, in the order of the tiles."""
        ...

    def weigh_tiles(
        self, inner: Tensor, routing: Routing, tiles: ExpertTiles, bias: Tensor | None
    ) -> Tensor:
        """Of this order, each pair's result times its weight [pairs, hidden], as numbered."""
        ...
