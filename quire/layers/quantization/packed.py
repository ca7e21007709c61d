"""Weights that are packed for their kernels as they arrive and kept in that format alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from quire.config.quantization import MXFP4, MatrixFormat
from quire.kernels import cpu, dispatch
from quire.kernels.cpu.memory import Arena, Empty
from quire.kernels.cpu.quantized import pack_grouped
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES, BlockRows
from quire.kernels.torch.quantize import (
    check_finite,
    suits_half_scales,
    to_fp8,
    to_groups,
    to_int8,
)
from quire.kernels.torch.quantized_weights import QuantizedWeights, ReferenceMatrix
from quire.layers.quantization.matrices import DenseMatrix, make_matrix
from quire.layers.quantization.readers import Reader, join_alike, make_reader
from quire.layers.weights import (
    Axis,
    Bring,
    Build,
    Matrix,
    MatrixLayer,
    NormWeight,
    ShardError,
    ShardId,
    ShardKey,
    Share,
    Weight,
)
from quire.protocol.errors import ModelError

HALVES = {torch.bfloat16, torch.float16}
INT8_BLOCK = 32
INT4_GROUP = 128


def kernels() -> ModuleType:
    """Those of the native library where it is there, else their references."""
    from quire.kernels.cpu import linear as native
    from quire.kernels.torch import linear as references

    return native if cpu.available()[0] else references


Stored = str | MatrixFormat | None


class Packer(Protocol):
    """A way to keep weights."""

    reads_blocks: bool
    """Whether blocks of a GGUF file are taken as they are stored."""

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        """Makes matrices of the weights that a layer joins."""
        ...

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        """What such a weight takes; `stored` is its kind of blocks in the file, or its format, if
        any."""
        ...


class PackFloats:
    """In float32, or in 16 bits if `keeps_halves` and they are stored so, in memory that `empty`
    gives."""

    reads_blocks = False

    def __init__(self, empty: Empty = torch.empty, keeps_halves: bool = False) -> None:
        self._empty = empty
        self._keeps_halves = keeps_halves

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        assert len(tensors) == len(weights), "blocks are for `PackBlocks`"
        stored = {tensor.dtype for tensor in tensors}
        halves = self._keeps_halves and len(stored) == 1 and stored <= HALVES
        dtype = tensors[0].dtype if halves else torch.float32
        return [kernels().pack_floats(tensors, self._empty, dtype)]

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        count: int = kernels().float_bytes(num_outputs, num_inputs)
        return count


class PackInt8:
    """8 bits with a scale for each block of inputs; float32 where blocks do not divide them."""

    reads_blocks = False

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        if weights[0].shape[1] % INT8_BLOCK:
            return PackFloats().pack(weights)
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        for tensor in tensors:
            check_finite(tensor)
        weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if suits_half_scales(weight):
            return [kernels().quantize_int8(weight)]
        groups = to_groups(weight, 8, INT8_BLOCK, scale_dtype=torch.float32)
        return [pack_grouped(groups, 1) if cpu.available()[0] else ReferenceMatrix(groups)]

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        if num_inputs % INT8_BLOCK:
            return PackFloats().nbytes(num_outputs, num_inputs, stored)
        count: int = kernels().packed_bytes("Q8_0", num_outputs, num_inputs)
        return count


class PackBlocks:
    """Blocks as they are stored; what is stored as numbers in float32."""

    reads_blocks = True

    def __init__(self, input_planes: int = 1) -> None:
        self._input_planes = input_planes

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        matrices: list[Matrix] = []
        for kind, group in groupby(weights, lambda weight: getattr(weight, "kind", None)):
            shards = list(group)
            if kind is None:
                matrices += PackFloats().pack(shards)
                continue
            rows = torch.cat([shard.rows for shard in shards if isinstance(shard, BlockRows)])
            num_inputs = shards[0].shape[1]
            if kind == "MXFP4":
                matrices.append(make_matrix(BlockRows(kind, rows, num_inputs)))
                continue
            matrices.append(kernels().pack_blocks(kind, rows, num_inputs, self._input_planes))
        return matrices

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        # Where a rank's share cuts blocks, they become numbers.
        if not isinstance(stored, str) or num_inputs % BLOCK_SIZES[stored][0]:
            return PackFloats().nbytes(num_outputs, num_inputs, stored)
        if stored == "MXFP4":
            return make_reader("", MXFP4, (num_outputs, num_inputs)).nbytes(cpu.available()[0])
        count: int = kernels().packed_bytes(stored, num_outputs, num_inputs)
        return count


class PackQuantized:
    """As checkpoints have quantised them; what they have not, in the model's dtype."""

    reads_blocks = False

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._is_native = dtype, device.type == "cpu" and cpu.available()[0]

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        matrices: list[Matrix] = []
        for one in join_alike(weights):
            if not isinstance(one, Tensor):
                matrices.append(make_matrix(one, self._dtype))
            elif one.device.type == "cpu" and self._dtype == torch.float32:
                matrices += PackFloats(keeps_halves=True).pack([one])
            else:
                matrices.append(DenseMatrix(one.to(self._dtype)))
        return matrices

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        if stored is None or isinstance(stored, str):
            return num_outputs * num_inputs * self._dtype.itemsize
        return make_reader("", stored, (num_outputs, num_inputs)).nbytes(self._is_native)


class PackDense:
    """Floats in the model's dtype, for layers that take their matrix apart."""

    reads_blocks = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        parts = [
            one if isinstance(one, Tensor) else one.dequantize(self._dtype)
            for one in weights
            if not isinstance(one, BlockRows)
        ]
        return [DenseMatrix(torch.cat(parts).to(self._dtype))]

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        return num_outputs * num_inputs * self._dtype.itemsize


class PackDeviceBlocks:
    """Blocks on a GPU as a GGUF file stores them; what it stores as numbers in the model's
    dtype."""

    reads_blocks = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        matrices: list[Matrix] = []
        for kind, group in groupby(weights, lambda weight: getattr(weight, "kind", None)):
            shards = list(group)
            if kind is None:
                tensors = [shard for shard in shards if isinstance(shard, Tensor)]
                matrices.append(DenseMatrix(torch.cat(tensors).to(self._dtype)))
                continue
            rows = torch.cat([shard.rows for shard in shards if isinstance(shard, BlockRows)])
            matrices.append(make_matrix(BlockRows(kind, rows, shards[0].shape[1]), self._dtype))
        return matrices

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        if not isinstance(stored, str) or num_inputs % BLOCK_SIZES[stored][0]:
            return num_outputs * num_inputs * self._dtype.itemsize
        elements, block_bytes = BLOCK_SIZES[stored]
        return num_outputs * (num_inputs // elements) * block_bytes


class PackRounded:
    """Weights of 16 bits rounded to fewer, on the device where they will be."""

    reads_blocks = False

    def __init__(self, quantization: str, dtype: torch.dtype) -> None:
        self._quantization, self._dtype = quantization, dtype

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        tensors = [one for one in weights if isinstance(one, Tensor)]
        rounded = join_alike([self._rounded(tensor) for tensor in tensors])
        return [make_matrix(one, self._dtype) for one in rounded if not isinstance(one, Tensor)]

    def _rounded(self, weight: Tensor) -> QuantizedWeights:
        if self._quantization == "int4":
            return to_groups(weight, group_size=min(INT4_GROUP, weight.shape[1]))
        return to_fp8(weight) if self._quantization == "fp8" else to_int8(weight)

    def nbytes(self, num_outputs: int, num_inputs: int, stored: Stored) -> int:
        if self._quantization == "int4":
            return num_outputs * (num_inputs // 2 + 2 * -(-num_inputs // INT4_GROUP))
        return num_outputs * (num_inputs + 4)


def _brought(share: Share, bring: Bring) -> Share:
    if isinstance(share, Tensor):
        return bring(share)
    return BlockRows(share.kind, bring(share.rows), share.shape[1])


def _stays(tensor: Tensor) -> Tensor:
    return tensor


def _multiply(
    matrices: Sequence[Matrix], x: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """x W^T + bias for a weight of several matrices, one below the other."""
    if len(matrices) == 1:
        return matrices[0].multiply(x, bias, out)
    if out is None:
        out = x.new_empty((len(x), sum(matrix.num_outputs for matrix in matrices)))
    first = 0
    for matrix in matrices:
        columns = slice(first, first + matrix.num_outputs)
        matrix.multiply(x, None if bias is None else bias[columns], out[:, columns])
        first = columns.stop
    return out


def _located(layer: MatrixLayer, shares: Mapping[ShardKey, Share]) -> ShardError | None:
    """Where a checkpoint has what cannot be rounded."""
    for key, share in shares.items():
        if isinstance(share, BlockRows) or share.isfinite().all():
            continue
        row, column = (~share.isfinite()).nonzero()[0].tolist()
        value, output = share[row, column].item(), row
        for cut in layer.rank_cuts("weight", key):
            if 0 <= row < cut.shape[0]:
                output, column = cut.outputs.start + row, cut.inputs.start + column
            row -= cut.shape[0]
        found = f"{value} for output {output} and input {column}"
        return ShardError(key, f"has {found}, which cannot be quantised")
    return None


class Packed:
    """A layer's weight becomes one matrix, or several where its shards differ in format. An `arena`
    is where the packer gets its memory from; `formats` are those of shards that a checkpoint has
    quantised, with the names of their modules there."""

    adapters = None
    tokens = None

    def __init__(
        self,
        packer: Packer,
        arena: Arena | None = None,
        formats: Mapping[ShardKey, tuple[str, MatrixFormat | None]] | None = None,
    ) -> None:
        self._packer = packer
        self._arena = arena
        self._formats = formats or {}

    @property
    def reads_blocks(self) -> bool:
        return self._packer.reads_blocks

    def extra_bytes(self, layer: MatrixLayer, shard_key: ShardKey, stored: str | None) -> int:
        *experts, num_outputs, num_inputs = layer.rank_shape("weight", shard_key)
        module, found = self._formats.get(shard_key, ("", None))
        if found is None:
            return prod(experts) * self._packer.nbytes(num_outputs, num_inputs, stored)
        shape = layer.checkpoint_shape("weight", shard_key)
        reader = make_reader(module, found, (shape[-2], shape[-1]), in_stack=bool(experts))
        one = (layer.kept_experts.start,) if experts else shard_key
        return prod(experts) * sum(
            self._packer.nbytes(*cut.shape, reader.kept_format(cut))
            for cut in layer.rank_cuts("weight", one)
        )

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        stacks = (layer.experts,) if layer.experts else ()
        layer.axes["weight"] = (*stacks, outputs, inputs)
        readers: dict[ShardKey, Reader] = {}
        names = {"weight"}
        for shard_key, (module, found) in self._formats.items():
            if found is None or not layer.keeps("weight", shard_key):
                continue
            *stack, num_outputs, num_inputs = layer.checkpoint_shape("weight", shard_key)
            reader = make_reader(module, found, (num_outputs, num_inputs), in_stack=bool(stack))
            keys: list[ShardKey] = [shard_key]
            if stack:
                keys = [(expert,) for expert in layer.kept_experts]
            for key in keys:
                readers[key] = reader
                layer.stored[key] = reader.tensors
            if stack:
                layer.stored[shard_key] = {
                    name: replace(one, shape=(*stack, *one.shape))
                    for name, one in reader.tensors.items()
                }
            names |= reader.tensors.keys()
        waiting: dict[ShardKey, dict[str, tuple[Weight, Bring]]] = {}
        parts = [shard.name for shard in outputs if shard.name is not None]
        for name in names:
            layer.loaders[name] = partial(self._load, readers, waiting, parts, name)
        layer.matrices = []

    def _load(
        self,
        readers: Mapping[ShardKey, Reader],
        waiting: dict[ShardKey, dict[str, tuple[Weight, Bring]]],
        parts: list[ShardId],
        name: str,
        layer: MatrixLayer,
        shard_key: ShardKey,
        weight: Weight,
        bring: Bring | None,
    ) -> None:
        """Keep a tensor until all of the matrix are there, then pack them."""
        if layer.experts and not shard_key:
            assert isinstance(weight, Tensor), "blocks have two dimensions"
            for expert in layer.kept_experts:
                one: ShardKey = (expert,)
                self._load(readers, waiting, parts, name, layer, one, weight[expert], bring)
            return
        owner = shard_key[:1] if layer.experts else ()
        is_part = len(shard_key) > len(owner)
        keys = [(*owner, part) for part in parts] if is_part else [shard_key]
        waiting.setdefault(shard_key, {})[name] = weight, bring or _stays
        arrived: list[Share | QuantizedWeights] = []
        shares: dict[ShardKey, Share] = {}
        for key in keys:
            if len(waiting.get(key, ())) < len(layer.stored_tensors("weight", key)):
                return
        for key in keys:
            tensors = waiting.pop(key)
            if key in readers:
                read = readers[key].read(tensors, layer.rank_cuts("weight", key))
                if any(isinstance(one, Tensor) for one in read):
                    layer.why_slower.append("kept as floats, because ranks cut groups of inputs")
                arrived += read
                continue
            stored, bring = tensors["weight"]
            shares[key] = _brought(layer.rank_share("weight", key, stored), bring)
            arrived.append(shares[key])
        try:
            matrices = self._packer.pack(arrived)
        except ModelError as error:  # numbers that cannot be rounded
            located = _located(layer, shares)
            if located is None:
                raise
            raise located from error
        if owner:
            layer.by_expert[int(owner[0])] = matrices
            layer.matrices += matrices
        else:
            layer.matrices = matrices
        if any(isinstance(matrix, ReferenceMatrix) for matrix in matrices):
            layer.why_slower.append("dequantised for each product, because no kernel has it")

    def finish_loading(self, layer: MatrixLayer) -> None:
        """The weight was packed when its last shard arrived; matrices of experts may have become
        one since."""
        count = max(map(len, layer.by_expert.values()), default=0)
        if not layer.experts:
            count = len(layer.matrices)
        if count > 1:
            layer.why_slower.append(f"{count} matrices, because its shards differ in format")
        if self._arena is not None:
            self._arena.settle()

    def apply(
        self, layer: MatrixLayer, x: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        return _multiply(layer.matrices, x, bias, out)

    def apply_expert(
        self, layer: MatrixLayer, expert: int, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return _multiply(layer.by_expert[expert], x, bias, None)

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
            return layer.matrices[0].multiply_normal(
                x, residual, norm.weight, norm.eps, bias, gated
            )
        normal, total = dispatch.rms_norm(x, norm.weight, norm.eps, residual)
        out = self.apply(layer, normal, bias)
        return dispatch.silu_and_mul(out) if gated else out, total

    def rows(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        (matrix,) = layer.matrices
        return matrix.rows(ids)
