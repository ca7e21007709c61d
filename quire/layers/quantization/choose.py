"""Which quantisation method each layer gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from quire.config.quantization import MatrixFormat, QuantizationConfig
from quire.config.resolve import GGUF_BLOCKS
from quire.kernels import cpu
from quire.kernels.cpu.memory import Arena
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES
from quire.layers.quantization.packed import (
    INT4_GROUP,
    INT8_BLOCK,
    PackBlocks,
    PackDense,
    PackDeviceBlocks,
    Packed,
    Packer,
    PackFloats,
    PackInt8,
    PackQuantized,
    PackRounded,
)
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import MethodFor, QuantizationMethod, ShardKey

CPU_PACKERS: dict[str, Callable[[], Packer]] = {
    "gguf": PackBlocks,
    "gguf-a16": lambda: PackBlocks(input_planes=2),
    "int8": PackInt8,
}


FormatsFor = Callable[[str], Mapping[ShardKey, tuple[str, MatrixFormat | None]]]
"""How a checkpoint has the matrix of the layer with a path: for each of its tensors, the module
there and the format."""


def choose_methods(
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device | str,
    formats_for: FormatsFor | None = None,
    exact_paths: Collection[str] = (),
    routers: tuple[str, ...] = (),
    dense: tuple[str, ...] = (),
) -> MethodFor:
    """The format of weights that is asked for, that of a quantised checkpoint, or the quickest that
    keeps every number. What is rounded here is all but `exact_paths` and what ends with one of
    `routers`; what ends with one of `dense` is kept as floats."""
    method_for = _choose_methods(quantization, dtype, device, formats_for, exact_paths, routers)
    if not dense:
        return method_for

    def or_dense(path: str) -> QuantizationMethod:
        if not path.endswith(dense):
            return method_for(path)
        formats = {} if formats_for is None else formats_for(path)
        if all(found is None for _, found in formats.values()):
            return Unquantized()
        return Packed(PackDense(dtype), formats=formats)

    return or_dense


def _choose_methods(
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device | str,
    formats_for: FormatsFor | None,
    exact_paths: Collection[str],
    routers: tuple[str, ...],
) -> MethodFor:
    where = torch.device(device)
    plain = _exact_method(dtype, where, keeps_halves=formats_for is not None)
    if formats_for is not None:
        return _checkpoint_methods(formats_for, plain, PackQuantized(dtype, where))
    if quantization is None:
        return lambda path: plain
    if where.type == "cpu" and quantization in CPU_PACKERS:
        packed = Packed(CPU_PACKERS[quantization]())
        return lambda path: plain if path.endswith(routers) else packed
    if quantization in GGUF_BLOCKS:
        packed = Packed(PackDeviceBlocks(dtype))
        return lambda path: packed
    rounded = Packed(PackRounded(quantization, dtype))

    def method_for(path: str) -> QuantizationMethod:
        return plain if path in exact_paths or path.endswith(routers) else rounded

    return method_for


def _checkpoint_methods(
    formats_for: FormatsFor, plain: QuantizationMethod, packer: Packer
) -> MethodFor:
    def method_for(path: str) -> QuantizationMethod:
        formats = formats_for(path)
        if all(found is None for _, found in formats.values()):
            return plain
        return Packed(packer, formats=formats)

    return method_for


def largest_block(quantization: str | None, quantized: QuantizationConfig | None = None) -> int:
    """Inputs of the largest blocks in which weights are, of a quantised checkpoint or else of the
    format that is asked for."""
    if quantized is not None:
        return quantized.block
    if quantization in (None, "fp8"):
        return 1
    if quantization in ("int8", "int4"):
        return INT8_BLOCK if quantization == "int8" else INT4_GROUP
    return max(elements for elements, _ in BLOCK_SIZES.values())


def _exact_method(
    dtype: torch.dtype, device: torch.device, keeps_halves: bool
) -> QuantizationMethod:
    """What a quantised checkpoint has not quantised is kept in 16 bits if it is stored so, as fast
    as the rest of it."""
    if device.type != "cpu" or dtype != torch.float32 or not cpu.available()[0]:
        return Unquantized()
    arena = Arena()
    return Packed(PackFloats(arena.empty, keeps_halves), arena)
