"""Weights on a CPU, packed for their kernels as they arrive and kept in that format alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels import cpu, dispatch
from quire.kernels.cpu.decoder import MatrixHandle
from quire.kernels.cpu.float_linear import GROUP, handle, pack_weight, packed_linear
from quire.kernels.cpu.memory import Arena, Empty
from quire.kernels.cpu.norm_linear import norm_linear
from quire.kernels.cpu.quantized import PackedMatrix
from quire.kernels.torch.gguf_blocks import BlockRows
from quire.layers.weights import (
    Axis,
    Build,
    Matrix,
    MatrixLayer,
    NormWeight,
    Shard,
    ShardId,
    Weight,
)

INT8_BLOCK = 32


@dataclass(frozen=True)
class FloatMatrix:
    """In float32."""

    packed: Tensor
    num_outputs: int

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return packed_linear(x, self.packed, self.num_outputs, bias, out)

    @cached_property
    def native_handle(self) -> MatrixHandle:
        return handle(self.packed, self.num_outputs)

    def multiply_normal(
        self, x: Tensor, residual: Tensor | None, norm: NormWeight, bias: Tensor | None, gated: bool
    ) -> tuple[Tensor, Tensor]:
        return norm_linear(self.native_handle, x, residual, norm.weight, norm.eps, bias, gated)

    def rows(self, ids: Tensor) -> Tensor:
        return self.packed[ids // GROUP, :, ids % GROUP]


@dataclass(frozen=True)
class PlainMatrix:
    """In float32, as torch computes with it where the native library is missing."""

    weight: Tensor

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def native_handle(self) -> MatrixHandle | None:
        return None

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        result = dispatch.linear(x, self.weight, bias)
        return result if out is None else out.copy_(result)

    def multiply_normal(
        self, x: Tensor, residual: Tensor | None, norm: NormWeight, bias: Tensor | None, gated: bool
    ) -> tuple[Tensor, Tensor]:
        return dispatch.norm_linear(x, residual, norm.weight, norm.eps, self.weight, bias, gated)

    def rows(self, ids: Tensor) -> Tensor:
        return dispatch.embedding(ids, self.weight)


@dataclass(frozen=True)
class BlockMatrix:
    """In the blocks of a GGUF format. `kernels`: the native library's, or their references."""

    kernels: ModuleType
    blocks: PackedMatrix

    @property
    def num_outputs(self) -> int:
        return self.blocks.num_outputs

    @property
    def nbytes(self) -> int:
        return self.blocks.data.nbytes

    @property
    def native_handle(self) -> MatrixHandle | None:
        handle: MatrixHandle | None = getattr(self.blocks, "handle", None)
        return handle

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        result: Tensor = self.kernels.packed_linear(x, self.blocks, bias, out)
        return result

    def multiply_normal(
        self, x: Tensor, residual: Tensor | None, norm: NormWeight, bias: Tensor | None, gated: bool
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.kernels.norm_linear(
            x, residual, norm.weight, norm.eps, self.blocks, bias, gated
        )
        return result

    def rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.kernels.packed_rows(self.blocks, ids)
        return rows


def block_kernels() -> ModuleType:
    """The native ones where there are any."""
    from quire.kernels.cpu import quantized as native
    from quire.kernels.torch import quantized as references

    return native if cpu.available()[0] else references


class Packer(Protocol):
    """A way to keep weights."""

    reads_blocks: bool
    """Whether blocks of a GGUF file are taken as they are stored."""

    def pack(self, weights: Sequence[Weight]) -> list[Matrix]:
        """Makes matrices of the weights that a layer joins."""
        ...

    def nbytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        """What such a weight takes; `stored` is its kind of blocks in the file, if any."""
        ...


class PackFloats:
    """In float32, in memory that `empty` gives."""

    reads_blocks = False

    def __init__(self, empty: Empty = torch.empty) -> None:
        self._empty = empty

    def pack(self, weights: Sequence[Weight]) -> list[Matrix]:
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        assert len(tensors) == len(weights), "blocks are for `PackBlocks`"
        if not cpu.available()[0]:
            return [PlainMatrix(torch.cat(tensors).float())]
        packed = pack_weight(*tensors, empty=self._empty)
        return [FloatMatrix(packed, sum(len(tensor) for tensor in tensors))]

    def nbytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        if cpu.available()[0]:
            num_outputs = -(-num_outputs // GROUP) * GROUP
        return num_outputs * num_inputs * torch.float32.itemsize


class PackInt8:
    """8 bits with a scale for each block of inputs; float32 where blocks do not divide them."""

    reads_blocks = False

    def __init__(self) -> None:
        self._floats = PackFloats()

    def pack(self, weights: Sequence[Weight]) -> list[Matrix]:
        if weights[0].shape[1] % INT8_BLOCK:
            return self._floats.pack(weights)
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        kernels = block_kernels()
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return [BlockMatrix(kernels, kernels.quantize_int8(joined))]

    def nbytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        if num_inputs % INT8_BLOCK:
            return self._floats.nbytes(num_outputs, num_inputs, stored)
        count: int = block_kernels().packed_bytes("Q8_0", num_outputs, num_inputs)
        return count


class PackBlocks:
    """Blocks as they are stored; what is stored as numbers in float32."""

    reads_blocks = True

    def __init__(self, input_planes: int = 1) -> None:
        self._floats, self._input_planes = PackFloats(), input_planes

    def pack(self, weights: Sequence[Weight]) -> list[Matrix]:
        matrices: list[Matrix] = []
        kernels = block_kernels()
        for kind, group in groupby(weights, lambda weight: getattr(weight, "kind", None)):
            parts = list(group)
            if kind is None:
                matrices += self._floats.pack(parts)
                continue
            rows = torch.cat([part.rows for part in parts if isinstance(part, BlockRows)])
            blocks = kernels.pack_blocks(kind, rows, parts[0].shape[1], self._input_planes)
            matrices.append(BlockMatrix(kernels, blocks))
        return matrices

    def nbytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        if stored is None:
            return self._floats.nbytes(num_outputs, num_inputs, stored)
        count: int = block_kernels().packed_bytes(stored, num_outputs, num_inputs)
        return count


class Packed:
    """A layer's weight becomes one matrix, or several where its parts differ in format. An `arena`
    is where the packer gets its memory from."""

    def __init__(self, packer: Packer, arena: Arena | None = None) -> None:
        self._packer = packer
        self._arena = arena

    @property
    def reads_blocks(self) -> bool:
        return self._packer.reads_blocks

    def extra_bytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        return self._packer.nbytes(num_outputs, num_inputs, stored)

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        assert build.parallel.size == 1, "packed weights are not divided among ranks yet"
        layer.axes["weight"] = (outputs, inputs)
        waiting: dict[ShardId | None, Weight | None] = {part.name: None for part in outputs}
        layer.loaders["weight"] = partial(self._load, layer, waiting)
        layer.matrices = []

    def _load(
        self,
        layer: MatrixLayer,
        waiting: dict[ShardId | None, Weight | None],
        shard: Shard,
        weight: Weight,
    ) -> None:
        """Keep a weight until all parts of the layer are there, then pack them."""
        if not shard:
            arrived = [weight]
        else:
            (name,) = shard
            waiting[name] = weight
            arrived = [weight for weight in waiting.values() if weight is not None]
            if len(arrived) < len(waiting):
                return
        layer.matrices = self._packer.pack(arrived)
        waiting.clear()

    def finish_loading(self, layer: MatrixLayer) -> None:
        """The weight was packed when its last part arrived."""
        if self._arena is not None:
            self._arena.settle()

    def apply(
        self, layer: MatrixLayer, x: Tensor, bias: Tensor | None, out: Tensor | None = None
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

    def apply_after_norm(
        self,
        layer: MatrixLayer,
        x: Tensor,
        residual: Tensor | None,
        norm: NormWeight,
        bias: Tensor | None,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        if len(layer.matrices) == 1:
            return layer.matrices[0].multiply_normal(x, residual, norm, bias, gated)
        normal, total = dispatch.rms_norm(x, norm.weight, norm.eps, residual)
        out = self.apply(layer, normal, bias)
        return dispatch.silu_and_mul(out) if gated else out, total

    def rows(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        (matrix,) = layer.matrices
        return matrix.rows(ids)
