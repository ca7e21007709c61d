"""Weights on a CPU, packed for their kernels as they arrive and kept in that form alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.cpu.float_linear import GROUP, pack_weight, packed_linear
from quire.layers.parallel import Axis, Placement, WeightedLayer


class Matrix(Protocol):
    """A weight [outputs, inputs] in the form that its kernel reads."""

    @property
    def num_outputs(self) -> int: ...

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """x W^T + bias, into `out` if given."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as floats, for an embedding."""
        ...


@dataclass(frozen=True)
class FloatMatrix:
    """In float32."""

    packed: Tensor
    num_outputs: int

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return packed_linear(x, self.packed, self.num_outputs, bias, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.packed[ids // GROUP, :, ids % GROUP]


Pack = Callable[[Sequence[Tensor]], list[Matrix]]
"""Makes matrices of the tensors that a layer joins."""


def pack_floats(weights: Sequence[Tensor]) -> list[Matrix]:
    return [FloatMatrix(pack_weight(*weights), sum(len(weight) for weight in weights))]


class Packed:
    """A layer's weight becomes one matrix, or several where its parts differ in format."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack

    def create_weights(
        self, layer: WeightedLayer, outputs: Axis, inputs: Axis, place: Placement
    ) -> None:
        assert place.parallel.size == 1, "packed weights are not divided among ranks yet"
        layer.axes["weight"] = (outputs, inputs)
        waiting: dict[str, Tensor | None] = dict.fromkeys(part.name for part in outputs)
        layer.loaders["weight"] = partial(self._load, layer, waiting)
        layer.matrices = []

    def _load(
        self,
        layer: WeightedLayer,
        waiting: dict[str, Tensor | None],
        shard: str | None,
        tensor: Tensor,
    ) -> None:
        """Keep a tensor until all parts of the layer are there, then pack them."""
        if shard is None:
            arrived = [tensor]
        else:
            waiting[shard] = tensor
            arrived = [tensor for tensor in waiting.values() if tensor is not None]
            if len(arrived) < len(waiting):
                return
        layer.matrices = self._pack(arrived)
        waiting.clear()

    def finish_loading(self, layer: WeightedLayer) -> None:
        """The weight was packed when its last part arrived."""

    def apply(
        self, layer: WeightedLayer, x: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        if len(layer.matrices) == 1:
            return layer.matrices[0].multiply(x, bias, out)
        if out is None:
            total = sum(matrix.num_outputs for matrix in layer.matrices)
            out = torch.empty((len(x), total), dtype=torch.float32)
        first = 0
        for matrix in layer.matrices:
            part = slice(first, first + matrix.num_outputs)
            matrix.multiply(x, None if bias is None else bias[part], out[:, part])
            first = part.stop
        return out

    def rows(self, layer: WeightedLayer, ids: Tensor) -> Tensor:
        (matrix,) = layer.matrices
        return matrix.rows(ids)

    def plain_weight(self, layer: WeightedLayer) -> Tensor | None:
        return None
