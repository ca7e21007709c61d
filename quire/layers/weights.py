"""Weights of layers: how they are made, which shard a rank keeps, how they are filled, and what the
quantisation method of a matrix must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Protocol

import torch
from torch import nn

from quire.kernels.adapter_pool import AdapterTokens, LayerAdapters
from quire.kernels.cpu.library import MatrixHandle
from quire.kernels.expert_matrices import ExpertMatrices
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES, BlockRows, dequantize_blocks
from quire.layers.parallel import Parallel, Stage
from quire.protocol.errors import ModelError

ShardId = int | str
ShardKey = tuple[ShardId, ...]
"""Names a checkpoint tensor among those that one of our parameters joins: ("q",), (3, "gate").
The empty one names all of them at once."""


class StoredMatrix(Protocol):
    """A matrix in a file, of which only the parts that are asked for are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor | BlockRows: ...


Share = torch.Tensor | BlockRows
"""What a rank keeps of a weight, in memory or mapped."""
Weight = Share | StoredMatrix
"""As a file stores it."""
Bring = Callable[[torch.Tensor], torch.Tensor]
"""Carries a tensor to the device of a model."""


class TensorError(ModelError):
    """A tensor of a checkpoint that cannot be what its name or format says. The loader adds the
    file, and the `remedy`, by default another download."""

    def __init__(self, tensor: str, problem: str, remedy: str | None = None) -> None:
        super().__init__(f"tensor {tensor} {problem}")
        self.tensor, self.problem, self.remedy = tensor, problem, remedy


class ShardError(ModelError):
    """A weight that cannot be kept as it should be. The loader adds its name and file."""

    def __init__(self, shard_key: ShardKey, problem: str) -> None:
        super().__init__(problem)
        self.shard_key, self.problem = shard_key, problem


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors that stand for a matrix in a checkpoint."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """Those that it may have, the usual one first."""
    fill: Callable[[torch.Tensor, torch.Generator], None]
    """Writes plausible values into such a tensor."""


@dataclass(frozen=True)
class Cut:
    """What a rank keeps of a checkpoint's matrix."""

    outputs: slice
    inputs: slice
    shape: tuple[int, int]
    """With padding."""


@dataclass(frozen=True)
class Build:
    """How and where the layers under a path are made."""

    dtype: torch.dtype
    device: torch.device
    parallel: Parallel
    method_for: MethodFor
    block: int = 1
    """Inputs of the largest blocks in which weights are stored: ranks do not cut them, if
    possible."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None: as many as the model has positions for."""
    path: str = ""
    """As modules are named from the model on: "model.layers.3.self_attn.qkv_proj"."""

    @property
    def stage(self) -> Stage:
        return self.parallel.stage

    def __truediv__(self, name: str) -> Build:
        """The same for what lies below, as with a path of files."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)


@dataclass(frozen=True)
class Shard:
    """A stretch of one dimension of a weight, of which this rank keeps [start, start + size).

    It may reach beyond the checkpoint's `full` entries; the excess is padding and stays zero.
    """

    full: int
    start: int
    size: int
    name: ShardId | None = None
    """Where a dimension joins several checkpoint tensors (q, k and v; gate and up). A number names
    an entry of a dimension along which they are stacked, and which they themselves lack."""
    stride: int = 1
    """Of the entries in the checkpoint's tensor, where those of several shards alternate."""

    @property
    def kept(self) -> int:
        return max(0, min(self.size, self.full - self.start))

    def times(self, count: int) -> Shard:
        """Where each entry stands for `count`."""
        return replace(
            self, full=self.full * count, start=self.start * count, size=self.size * count
        )


Axis = tuple[Shard, ...]


def whole(size: int) -> Axis:
    """A dimension that every rank keeps entirely."""
    return (Shard(size, 0, size),)


def divided(size: int, parallel: Parallel, name: str | None = None, block: int = 1) -> Axis:
    """A dimension of which each rank keeps an equal share, if possible of whole blocks; the last
    ones may have padding."""
    share = parallel.share(size, block)
    return (Shard(size, parallel.rank * share, share, name),)


class StackedAxis(tuple[Shard, ...]):
    """A dimension of which each checkpoint tensor is one entry, which has its number for a name.
    There may be hundreds, so none is looked for."""

    kept: range
    """The entries that this rank keeps."""

    def entry(self, shard_key: ShardKey) -> int | None:
        """The one that a key names, if any."""
        for name in shard_key:
            if isinstance(name, int) and 0 <= name < len(self):
                return name
        return None


def stacked(count: int, kept: range | None = None) -> StackedAxis:
    """A dimension with one entry for each of `count` checkpoint tensors, such as experts; a rank
    may keep some of them only."""
    kept = range(count) if kept is None else kept
    axis = StackedAxis(Shard(1, 0, int(i in kept), i) for i in range(count))
    axis.kept = kept
    return axis


def alternating(axis: Axis) -> Axis:
    """The shards of a dimension whose entries take turns in the checkpoint's tensor."""
    return tuple(replace(shard, stride=len(axis)) for shard in axis)


@dataclass(frozen=True)
class _Selected:
    """A shard that a checkpoint tensor holds, with its offsets there and in the parameter."""

    shard: Shard
    there: int
    here: int

    @property
    def source(self) -> slice:
        stride = self.shard.stride
        first = self.there + self.shard.start * stride
        return slice(first, first + self.shard.kept * stride, stride)

    @property
    def target(self) -> slice:
        return slice(self.here, self.here + self.shard.kept)


def _selected(axis: Axis, shard_key: ShardKey) -> Iterator[_Selected]:
    """All shards where the key names none of them."""
    if isinstance(axis, StackedAxis) and (entry := axis.entry(shard_key)) is not None:
        yield _Selected(axis[entry], 0, max(0, entry - axis.kept.start))
        return
    named = any(shard.name in shard_key for shard in axis)
    there = here = 0
    for shard in axis:
        if not named or shard.name in shard_key:
            yield _Selected(shard, there, here)
            there += shard.full if shard.stride == 1 else 1
        here += shard.size


def _is_indexed(axis: Axis, shard_key: ShardKey) -> bool:
    """Whether the key is that of one entry of a stacked dimension."""
    return isinstance(axis, StackedAxis) and axis.entry(shard_key) is not None


def _is_known(name: ShardId, axes: tuple[Axis, ...]) -> bool:
    return any(
        axis.entry((name,)) is not None
        if isinstance(axis, StackedAxis)
        else any(shard.name == name for shard in axis)
        for axis in axes
    )


class WeightedLayer(nn.Module):
    """A layer whose parameters know what to take from a checkpoint tensor and where to put it."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.path = build.path
        self.axes: dict[str, tuple[Axis, ...]] = {}

    def add_weight(
        self, name: str, axes: tuple[Axis, ...], build: Build, dtype: torch.dtype | None = None
    ) -> None:
        """Makes an uninitialised parameter with one axis per dimension, of the model's dtype unless
        another is given."""
        shape = [sum(shard.size for shard in axis) for axis in axes]
        padded = any(shard.kept < shard.size for axis in axes for shard in axis)
        make = torch.zeros if padded else torch.empty
        tensor = make(shape, dtype=build.dtype if dtype is None else dtype, device=build.device)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.axes[name] = axes

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Of parameter `name`; None where the weight is not kept as one."""
        return self.get_parameter(name).dtype

    def checkpoint_shape(self, name: str, shard_key: ShardKey = ()) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor that belongs in parameter `name`."""
        axes = self.axes[name]
        assert all(_is_known(name, axes) for name in shard_key), (
            f"{self.path}.{name} has no shard {shard_key}"
        )
        return tuple(
            sum(selected.shard.full for selected in _selected(axis, shard_key))
            for axis in axes
            if not _is_indexed(axis, shard_key)
        )

    def keeps(self, name: str, shard_key: ShardKey) -> bool:
        """Whether this rank keeps the entry of a stacked dimension that the key names, if any."""
        stacks = (axis for axis in self.axes[name] if isinstance(axis, StackedAxis))
        entries = ((axis.kept, axis.entry(shard_key)) for axis in stacks)
        return all(entry is None or entry in kept for kept, entry in entries)

    def rank_shape(self, name: str, shard_key: ShardKey) -> tuple[int, ...]:
        """Shape of what this rank keeps of such a tensor, with padding."""
        return tuple(
            sum(selected.shard.size for selected in _selected(axis, shard_key))
            for axis in self.axes[name]
            if not _is_indexed(axis, shard_key)
        )

    def stored_tensors(self, name: str, shard_key: ShardKey) -> Mapping[str, StoredTensor | None]:
        """The tensors of a checkpoint that belong in parameter `name`, by the last parts of their
        names; None where it is the parameter itself."""
        return {name: None}

    def rank_cuts(self, name: str, shard_key: ShardKey) -> list[Cut]:
        """What this rank keeps of a checkpoint's matrix, from the first output on."""
        outputs, (inputs,) = self._selected_parts(name, shard_key)
        width = inputs.shard.size
        return [Cut(one.source, inputs.source, (one.shard.size, width)) for one in outputs]

    def rank_share(self, name: str, shard_key: ShardKey, weight: Weight) -> Share:
        """What this rank keeps of a checkpoint's matrix, with padding; nothing else is read."""
        shape = self.rank_shape(name, shard_key)
        outputs, (inputs,) = self._selected_parts(name, shard_key)
        parts = [weight[one.source, inputs.source] for one in outputs]
        if len(parts) == 1 and tuple(parts[0].shape) == shape:
            return parts[0]
        sizes = [one.shard.size for one in outputs]
        if not isinstance(parts[0], BlockRows):
            numbers = [part for part in parts if isinstance(part, torch.Tensor)]
            return _padded(numbers, sizes, shape[1])
        kind = parts[0].kind
        elements, block_bytes = BLOCK_SIZES[kind]
        rows = [part.rows for part in parts if isinstance(part, BlockRows)]
        if shape[1] % elements == 0:  # blocks of zeros are zeros
            joined = _padded(rows, sizes, shape[1] // elements * block_bytes)
            return BlockRows(kind, joined, shape[1])
        numbers = [
            dequantize_blocks(part.reshape(-1, block_bytes), kind).view(len(part), -1)
            for part in rows
        ]
        return _padded(numbers, sizes, shape[1])

    def _selected_parts(self, name: str, shard_key: ShardKey) -> list[list[_Selected]]:
        """Of each dimension that the checkpoint's tensor has."""
        axes = (axis for axis in self.axes[name] if not _is_indexed(axis, shard_key))
        return [list(_selected(axis, shard_key)) for axis in axes]

    def load(
        self, name: str, shard_key: ShardKey, tensor: Weight, bring: Bring | None = None
    ) -> None:
        """Copies this rank's share of a checkpoint tensor into place, casting as it goes; no more
        than that is brought to the device."""
        shape = self.checkpoint_shape(name, shard_key)
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 == prod(shape):
            tensor = tensor.reshape(shape)  # scales are stored with and without a dimension
        parameter, axes = self.get_parameter(name), self.axes[name]
        indexed = [_is_indexed(axis, shard_key) for axis in axes]
        for selection in product(*(_selected(axis, shard_key) for axis in axes)):
            by_axis = zip(selection, indexed, strict=True)
            source = tuple(one.source for one, is_absent in by_axis if not is_absent)
            part = tensor[source]
            assert isinstance(part, torch.Tensor), "only packed weights are loaded from blocks"
            place = parameter[tuple(one.target for one in selection)]
            if part.numel() and place.numel():
                place.copy_(part if bring is None else bring(part))

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Writes plausible values of parameter `name` into `tensor`, shaped as in a checkpoint."""
        if not tensor.is_floating_point():
            tensor.random_(generator=generator)
        elif tensor.dtype.itemsize > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:  # types of one byte are stored in, not computed with
            tensor.copy_(tensor.half().normal_(0.0, 0.02, generator=generator))

    def finish_loading(self) -> None:
        """Called once, when all tensors are in place."""


def _padded(parts: list[torch.Tensor], sizes: list[int], width: int) -> torch.Tensor:
    """The rows of all parts, each with zeros up to its size, and `width` columns."""
    joined, here = parts[0].new_zeros(sum(sizes), width), 0
    for part, size in zip(parts, sizes, strict=True):
        joined[here : here + len(part), : part.shape[1]] = part
        here += size
    return joined


class NormWeight(Protocol):
    """What a method needs of an RMSNorm."""

    weight: torch.nn.Parameter
    eps: float


class Matrix(Protocol):
    """A weight [outputs, inputs] in the format that its kernel reads."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """x W^T + bias, into `out` if given, which may be float32 where the matrix is floats."""
        ...

    def multiply_normal(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`multiply` of norm(x + residual), and x + residual; see `apply_after_norm` of methods."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as floats, for an embedding."""
        ...

    @property
    def handle(self) -> MatrixHandle | None:
        """The matrix as the native library knows it; None if references compute with it."""
        ...


class GatedMatrix(Matrix, Protocol):
    """A matrix that takes gates with what they are multiplied with, before its inputs are made of
    these."""

    def takes_gates(self, num_tokens: int) -> bool:
        """Whether `multiply_gates` is the quicker way for a batch."""
        ...

    def multiply_gates(self, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`multiply` of silu(gate) * up, for gate and up side by side."""
        ...


Loader = Callable[["MatrixLayer", ShardKey, Weight, Bring | None], None]


class MatrixLayer(WeightedLayer):
    """A layer with a matrix [outputs, inputs] in the format of its quantisation method."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.method = build.method_for(build.path)
        self.loaders: dict[str, Loader] = {}
        """What takes in the tensors of weights that are not kept as parameters."""
        self.stored: dict[ShardKey, Mapping[str, StoredTensor]] = {}
        """The tensors that stand for shards of the matrix, where it is not one tensor."""
        self.matrices: list[Matrix] = []
        """What became of them."""
        self.experts: Axis = ()
        """Where the layer has a matrix for each expert; `by_expert` has those that it keeps."""
        self.by_expert: dict[int, list[Matrix]] = {}
        self.stacked: ExpertMatrices | None = None
        """All of these, where the kernels of a GPU take them together; then it alone has them."""
        self.why_slower: list[str] = []
        """Why the layer computes slower than others of its format."""

    @property
    def kept_experts(self) -> range:
        kept = [number for number, shard in enumerate(self.experts) if shard.size]
        return range(kept[0], kept[-1] + 1) if kept else range(0)

    def weight_dtype(self, name: str) -> torch.dtype | None:
        return None if name in self.loaders else super().weight_dtype(name)

    def stored_tensors(self, name: str, shard_key: ShardKey) -> Mapping[str, StoredTensor | None]:
        stored = self.stored.get(shard_key) if name == "weight" else None
        return super().stored_tensors(name, shard_key) if stored is None else stored

    def load(
        self, name: str, shard_key: ShardKey, tensor: Weight, bring: Bring | None = None
    ) -> None:
        if name in self.loaders:
            self.loaders[name](self, shard_key, tensor, bring)
        else:
            super().load(name, shard_key, tensor, bring)

    def finish_loading(self) -> None:
        self.method.finish_loading(self)


class QuantizationMethod(Protocol):
    """A weight format. One object serves any number of layers; parameters belong to the layers."""

    @property
    def reads_blocks(self) -> bool:
        """Whether weights are to be loaded as blocks, where a file stores them so."""
        ...

    @property
    def adapters(self) -> LayerAdapters | None:
        """What adapters add to the results; None where there are none."""
        ...

    @property
    def tokens(self) -> AdapterTokens | None:
        """What the tokens of this step use of it; None: no token uses an adapter."""
        ...

    def extra_bytes(self, layer: MatrixLayer, shard_key: ShardKey, stored: str | None) -> int:
        """Memory of what this rank keeps of a checkpoint's matrix beside the parameters of its
        layer. `stored` is its kind of blocks in the file, if `reads_blocks`."""
        ...

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        """Adds to `layer` the parameters that stand for its [outputs, inputs] matrix."""

    def finish_loading(self, layer: MatrixLayer) -> None:
        """Repacks the loaded parameters into the layout that `apply` reads."""

    def apply(
        self,
        layer: MatrixLayer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x W^T + bias, into `out` if given, which may be float32 where the matrix is floats."""

    def apply_expert(
        self, layer: MatrixLayer, expert: int, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + bias with the matrix of one of the layer's experts."""

    def rows(self, layer: MatrixLayer, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the matrix that `ids` name: an embedding."""

    def apply_after_norm(
        self,
        layer: MatrixLayer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: NormWeight,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`apply` of the RMSNorm of x + residual, x + residual), with silu(gate) * up of the
        first if `gated`; the residual may be overwritten."""


MethodFor = Callable[[str], QuantizationMethod]
"""The method of the layer with a path such as "model.layers.3.mlp.down_proj"."""
