"""Which quantisation method each layer gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
)
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import MethodFor, QuantizationMethod

PACKERS: dict[str, Callable[[], Packer]] = {
    "gguf": PackBlocks,
    "gguf-a16": lambda: PackBlocks(input_planes=2),
    "int8": PackInt8,
}


def choose_methods(
    quantization: str | None, dtype: torch.dtype, device: torch.device | str, parallel: Parallel
) -> MethodFor:
    """The format of weights that is asked for, or the quickest that keeps every number."""
    method = _choose_method(quantization, dtype, torch.device(device), parallel)
    return lambda path: method


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
