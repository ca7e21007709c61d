"""Linear layers and embeddings from packed quantised weights, in the native library.

The signatures are those of the references in `quire.kernels.torch.quantized`. src/quantized.h says
how weights are packed, and quire/kernels/cpu/packing.py does it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from quire.kernels.cpu.library import NativeMatrix, native, num_threads
from quire.kernels.cpu.norm_linear import norm_linear as native_norm_linear
from quire.kernels.cpu.norm_linear import require_rows
from quire.kernels.cpu.packing import GROUP, group_bytes, int8_group_bytes, pack_rows
from quire.kernels.torch.quantized import KINDS, check_inputs, check_rows

__all__ = [
    "KINDS",
    "PackedMatrix",
    "norm_linear",
    "pack_blocks",
    "packed_bytes",
    "packed_linear",
    "packed_rows",
    "quantize_int8",
]

# Rows that are rounded at a time, to bound the memory for them in float32.
ROWS_AT_ONCE = 64 * GROUP


@dataclass(frozen=True)
class PackedMatrix:
    """Quantised weights [num_outputs, num_inputs] of a linear layer or an embedding."""

    kind: str
    num_outputs: int
    num_inputs: int
    data: Tensor
    """uint8 [groups of 32 rows, bytes], as src/quantized.h describes it."""
    input_planes: int = 1
    """Bytes for each input that is multiplied with it: 1 for 8 bits, 2 for 15."""

    @cached_property
    def handle(self) -> ctypes._Pointer[NativeMatrix]:
        """What the library takes. It holds an address: the matrix must outlive it."""
        shape = (self.num_outputs, self.num_inputs)
        kind = KINDS.index(self.kind)
        return ctypes.pointer(NativeMatrix(self.data.data_ptr(), kind, *shape, self.input_planes))


def pack_blocks(kind: str, rows: Tensor, num_inputs: int, input_planes: int = 1) -> PackedMatrix:
    """Packs rows [outputs, bytes] of blocks of this kind, as in a GGUF file."""
    check_rows(kind, rows, num_inputs)
    return PackedMatrix(kind, len(rows), num_inputs, pack_rows(kind, rows), input_planes)


def packed_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    """What a matrix takes in blocks of this kind."""
    check_inputs(kind, num_inputs)
    return -(-num_outputs // GROUP) * group_bytes(kind, num_inputs)


def quantize_int8(weight: Tensor) -> PackedMatrix:
    """Weights [outputs, inputs] of any floating type in 8 bits."""
    num_outputs, num_inputs = weight.shape
    check_inputs("Q8_0", num_inputs)
    data = torch.empty(-(-num_outputs // GROUP), int8_group_bytes(num_inputs), dtype=torch.uint8)
    parts = zip(weight.split(ROWS_AT_ONCE), data.split(ROWS_AT_ONCE // GROUP), strict=True)
    for part, groups in parts:
        rows = part.float().contiguous()
        native().quire_pack_int8(
            rows.data_ptr(), rows.stride(0), len(rows), num_inputs, groups.data_ptr()
        )
    return PackedMatrix("Q8_0", num_outputs, num_inputs, data)


def packed_linear(
    x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x W^T + bias for x [tokens, inputs] in float32, which is rounded first, to as many bits
    as the matrix has planes for.

    A token with an infinity or NaN gets NaN for all outputs. `out` may be some columns of a wider
    tensor.
    """
    x_stride = require_rows("x", x, matrix.num_inputs)
    num_tokens = x.shape[0]
    if out is None:
        out = torch.empty(num_tokens, matrix.num_outputs)
        out_stride = matrix.num_outputs
    else:
        out_stride = require_rows("out", out, matrix.num_outputs)
        if out.shape[0] != num_tokens:
            raise ValueError(f"out has {out.shape[0]} rows for {num_tokens} tokens")
    bias_address = None
    if bias is not None:
        require_rows("bias", bias.unsqueeze(0), matrix.num_outputs)
        bias_address = bias.data_ptr()
    status = linear_entry()(
        matrix.handle,
        x.data_ptr(),
        x_stride,
        num_tokens,
        bias_address,
        out.data_ptr(),
        out_stride,
        num_threads(),
    )
    if status != 0:
        raise MemoryError("no memory for the rounded inputs of a linear layer")
    return out


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    matrix: PackedMatrix,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`packed_linear` of norm(x + residual), and x + residual; see the reference."""
    return native_norm_linear(matrix.handle, x, residual, norm_weight, eps, bias, gated)


def packed_rows(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """The rows that `ids` [n] name, exactly, in float32 [n, inputs]."""
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty(len(ids), matrix.num_inputs)
    if native().quire_packed_rows(matrix.handle, ids.data_ptr(), len(ids), out.data_ptr()) != 0:
        raise IndexError(f"ids must be from 0 to {matrix.num_outputs - 1}")
    return out


@cache
def linear_entry() -> ctypes._NamedFuncPointer:
    """The library's function; to look it up takes longer than to call it."""
    return native().quire_packed_linear
