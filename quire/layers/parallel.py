"""Tensor parallelism: a rank among its peers, and which part of each weight that rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from quire.protocol.errors import ModelError

if TYPE_CHECKING:
    from quire.layers.quantization.packed import Matrix, Weight
    from quire.layers.quantization.scheme import Scheme


@dataclass(frozen=True)
class Parallel:
    """One rank of the `size` that share a model. Collectives do nothing where there is one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`; may reuse `x`."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, joined along the last dimension in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def share(self, total: int, what: str) -> int:
        """An equal share of `total` things, which must divide evenly."""
        if total % self.size:
            raise ModelError(
                f"tensor_parallel_size={self.size} does not divide the model's {what} ({total}); "
                f"choose a size that does."
            )
        return total // self.size

    def kv_heads(self, num_kv_heads: int) -> int:
        """KV heads on each rank. Where there are fewer than ranks, each is kept by several."""
        if num_kv_heads >= self.size:
            return self.share(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ModelError(
                f"tensor_parallel_size={self.size} is not a multiple of the model's "
                f"num_key_value_heads ({num_kv_heads}); choose a size that is, or a smaller one."
            )
        return 1


@dataclass(frozen=True)
class Placement:
    """How and where a layer's weights are made."""

    dtype: torch.dtype
    device: torch.device
    parallel: Parallel
    scheme: Scheme


@dataclass(frozen=True)
class Part:
    """A stretch of one dimension of a weight, of which this rank keeps [start, start + size).

    It may reach beyond the checkpoint's `full` entries; the excess is padding and stays zero.
    """

    full: int
    start: int
    size: int
    name: str = ""
    """Shard id, where a dimension joins several checkpoint tensors (q, k and v; gate and up)."""

    @property
    def kept(self) -> int:
        return max(0, min(self.size, self.full - self.start))


Axis = tuple[Part, ...]


def whole(size: int) -> Axis:
    """A dimension that every rank keeps entirely."""
    return (Part(size, 0, size),)


def divided(size: int, parallel: Parallel, what: str, name: str = "") -> Axis:
    """A dimension of which each rank keeps an equal share."""
    share = parallel.share(size, what)
    return (Part(size, parallel.rank * share, share, name),)


def _selected(axis: Axis, shard: str | None) -> Iterator[tuple[Part, int, int]]:
    """Parts that checkpoint tensor `shard` holds (None: all), with their offsets there and here."""
    there = here = 0
    for part in axis:
        if shard is None or len(axis) == 1 or part.name == shard:
            yield part, there, here
            there += part.full
        here += part.size


class WeightedLayer(nn.Module):
    """A layer whose parameters know what to take from a checkpoint tensor and where to put it."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, tuple[Axis, ...]] = {}
        self.loaders: dict[str, Callable[[str | None, Weight], None]] = {}
        """Who takes in the tensors of weights that are not kept as parameters."""
        self.matrices: list[Matrix] = []
        """What became of them."""

    def add_weight(self, name: str, axes: tuple[Axis, ...], place: Placement) -> None:
        """Makes an uninitialised parameter with one axis per dimension."""
        shape = [sum(part.size for part in axis) for axis in axes]
        padded = any(part.kept < part.size for axis in axes for part in axis)
        make = torch.zeros if padded else torch.empty
        tensor = make(shape, dtype=place.dtype, device=place.device)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.axes[name] = axes

    def checkpoint_shape(self, name: str, shard: str | None) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor that belongs in parameter `name`."""
        return tuple(
            sum(part.full for part, _, _ in _selected(axis, shard)) for axis in self.axes[name]
        )

    def load(self, name: str, shard: str | None, tensor: Weight) -> None:
        """Copies this rank's share of a checkpoint tensor into place, casting as it goes."""
        if name in self.loaders:
            self.loaders[name](shard, tensor)
            return
        assert isinstance(tensor, torch.Tensor), "only packed weights are loaded from blocks"
        parameter = self.get_parameter(name)
        for selection in product(*(_selected(axis, shard) for axis in self.axes[name])):
            source = tuple(
                slice(there + part.start, there + part.start + part.kept)
                for part, there, _ in selection
            )
            target = tuple(slice(here, here + part.kept) for part, _, here in selection)
            parameter[target].copy_(tensor[source])

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Writes plausible values of parameter `name` into `tensor`, shaped as in a checkpoint."""
        tensor.normal_(0.0, 0.02, generator=generator)

    def finish_loading(self) -> None:
        """Called once, when all tensors are in place."""
