"""Which quantisation method each layer gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quire.config.quantization import MatrixFormat
from quire.kernels import cpu
from quire.kernels.cpu.memory import Arena
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES
from quire.layers.parallel import Parallel
from quire.layers.quantization.packed import (
    INT8_BLOCK,
    PackBlocks,
    Packed,
    Packer,
    PackFloats,
    PackInt8,
    PackQuantized,
)
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import MethodFor, QuantizationMethod, ShardKey

PACKERS: dict[str, Callable[[], Packer]] = {
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
    parallel: Parallel,
    formats_for: FormatsFor | None = None,
) -> MethodFor:
    """The format of weights that is asked for, that of a quantised checkpoint, or the quickest that
    keeps every number."""
    where = torch.device(device)
    if formats_for is None:
        method = _choose_method(quantization, dtype, where, parallel)
        return lambda path: method
    plain, packer = _choose_method(None, dtype, where, parallel), PackQuantized(dtype)

    def method_for(path: str) -> QuantizationMethod:
        formats = formats_for(path)
        if all(found is None for _, found in formats.values()):
            return plain
        return Packed(packer, formats=formats)

    return method_for


def largest_block(quantization: str | None) -> int:
    """Inputs of the largest blocks in which a format has weights."""
    if quantization is None:
        return 1
    if quantization == "int8":
        return INT8_BLOCK
    return max(elements for elements, _ in BLOCK_SIZES.values())


def _choose_method(
    quantization: str | None, dtype: torch.dtype, device: torch.device, parallel: Parallel
) -> QuantizationMethod:
    if quantization is not None:
        return Packed(PACKERS[quantization]())
    if device.type != "cpu" or dtype != torch.float32:
        return Unquantized()
    if not cpu.available()[0]:
        return Unquantized()
    arena = Arena()
    return Packed(PackFloats(arena.empty), arena)
