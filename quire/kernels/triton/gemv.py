"""Matrix times vector, the linear layers of a single token: reads the weight at memory speed.

Weights of 8 bits are multiplied with the input as it is, also where larger batches round it: that
is no slower, and more exact.

Each program computes a few outputs over the whole input. In a small model a kernel of its own costs
more than its work, so what stands before and after the layer is done in passing: the residual is
added and normalised while the input is read, gate and up are combined when they are summed. cuBLAS
needs 10 to 30 % longer on layers of an 8B model, and up to four times as long on small ones
(docs/lab/gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.grouped_matrix import is_hopper

MAX_FUSED_INPUTS = 2048
"""Up to here it pays to normalise in passing: every program does it anew."""


@triton.jit
def widen(weight):
    """Weights as float32. Bytes are float8_e4m3fn, for GPUs that do not know it."""
    if weight.dtype == tl.uint8:
        # The same bits in a float16, whose exponents start 8 lower.
        bits = weight.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0
    if weight.dtype == tl.int8:
        # The lowest bits of 2 ** 23 + 128: quicker than the conversion of integers.
        bits = ((weight.to(tl.int32) + 128) & 0xFF) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    return weight.to(tl.float32)


@triton.jit
def _gemv_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    norm_ptr,
    eps,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    stride_weight,
    stride_scales,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    rows = first + tl.arange(0, OUTPUTS)
    in_rows = rows < num_outputs
    if BLOCK_INPUTS > 0:
        # Inputs lie in [blocks, inputs of a block], so that a scale is loaded once for all of it.
        blocks = tl.arange(0, INPUTS // BLOCK_INPUTS)
        columns = blocks[:, None] * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)[None, :]
        every_row = rows.to(tl.int64)[:, None, None]
        acc = tl.zeros([OUTPUTS, INPUTS // BLOCK_INPUTS, BLOCK_INPUTS], tl.float32)
    else:
        columns = tl.arange(0, INPUTS)
        every_row = rows.to(tl.int64)[:, None]
        acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    weight_rows = weight_ptr + every_row * stride_weight
    acc_up = acc
    squares = tl.zeros(columns.shape, tl.float32)
    wait_for_inputs(OVERLAPS)
    kept = tl.where(tl.program_id(0) == 0, num_inputs, 0)  # one program writes the sum
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        at = start + columns
        in_columns = at < num_inputs
        mask = (every_row < num_outputs) & tl.expand_dims(in_columns, 0)
        weight = tl.load(weight_rows + tl.expand_dims(at, 0), mask, 0.0)
        x = tl.load(x_ptr + at, in_columns, 0.0)
        if HAS_RESIDUAL:
            # Rounded to the model's type, as the sum is kept.
            residual = tl.load(residual_ptr + at, in_columns, 0.0).to(tl.float32)
            x = (x.to(tl.float32) + residual).to(x.dtype)
            tl.store(sum_ptr + at, x, at < kept)
        wide = x.to(tl.float32)
        if HAS_NORM:
            squares += wide * wide
            wide *= tl.load(norm_ptr + at, in_columns, 0.0).to(tl.float32)
        wide_up = wide
        if BLOCK_INPUTS > 0:
            # A program's rows lie in one block, so scales can go to the input.
            place = scales_ptr + start // BLOCK_INPUTS + blocks
            known = start + blocks * BLOCK_INPUTS < num_inputs
            if IS_GATED:
                of_up = (num_outputs + first) // BLOCK_OUTPUTS * stride_scales
                wide_up = wide * tl.load(place + of_up, known, 0.0)[:, None]
            place += first // BLOCK_OUTPUTS * stride_scales
            wide *= tl.load(place, known, 0.0)[:, None]
        acc += widen(weight) * tl.expand_dims(wide, 0)
        if IS_GATED:
            up_rows = weight_rows + num_outputs.to(tl.int64) * stride_weight
            up = tl.load(up_rows + tl.expand_dims(at, 0), mask, 0.0)
            acc_up += widen(up) * tl.expand_dims(wide_up, 0)
    if BLOCK_INPUTS > 0:
        acc = tl.sum(acc, 2)
        acc_up = tl.sum(acc_up, 2)
        squares = tl.sum(squares, 1)
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1)
    if scales_ptr is not None and BLOCK_INPUTS == 0:
        total *= tl.load(scales_ptr + rows, in_rows, 0.0)
        if IS_GATED:
            total_up *= tl.load(scales_ptr + num_outputs + rows, in_rows, 0.0)
    if HAS_NORM:
        # The norm's scale is common to all inputs, so it can come last.
        scale = tl.rsqrt(tl.sum(squares, 0) / num_inputs + eps)
        total *= scale
        total_up *= scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, in_rows, 0.0).to(tl.float32)
    if IS_GATED:
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + num_outputs + rows, in_rows, 0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * total_up
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), in_rows)


class Tile(NamedTuple):
    """What a program works on at a time, and with how many warps."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int | None = None
    """Of these loads ahead of their use; None: as the compiler likes."""


def _tile(num_inputs: int, has_norm: bool) -> Tile:
    """The quickest of those measured on an H200."""
    if num_inputs <= 1024:
        return Tile(2, 512, 2) if has_norm else Tile(4, 512, 1)
    if has_norm:
        return Tile(4, 512, 1)
    return Tile(2, 1024, 4) if num_inputs < 4096 else Tile(2, 2048, 2)


def _tile8(num_outputs: int, block: tuple[int, int] | None, gated: bool) -> Tile:
    """The same for weights of 8 bits."""
    if gated:
        return Tile(16, 256, 2, 4)
    if block is not None:
        return Tile(8, 256, 1, 5)
    return Tile(8, 512, 2, 4) if num_outputs <= 4096 else Tile(8, 256, 2, 5)


STREAMS: tuple[int, int, int] | None = None
"""Those of `hopper/vector_stream.py` to multiply by, which read further ahead; None, as no GPU has
run it yet: by the kernel here."""


@dataclass(frozen=True)
class NormInput:
    """The input is x plus the residual, if any, RMS-normalised."""

    weight: Tensor
    eps: float
    residual: Tensor | None = None


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: NormInput | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    block: tuple[int, int] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """x W^T + bias for x [1, inputs] and W [outputs, inputs], and x plus the residual.

    If `gated`, the first half of the outputs is the gate, and the result silu(gate) * up. A W of 8
    bits has `scales` of its rows, or of each `block` as in `ScaledWeights`. Tiles do not cut
    blocks if these have a power of two of outputs, at least 16; gate and up must not either.
    """
    num_rows, num_inputs = weight.shape
    num_outputs = num_rows // 2 if gated else num_rows
    if out is None:
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    if STREAMS is not None and norm is None and not gated and is_hopper(x.device):
        from quire.kernels.hopper import vector_stream

        streams = vector_stream.Streams(*STREAMS)
        if vector_stream.why_not(x, weight, block, streams) is None:
            vector_stream.multiply_vector(x, weight, bias, out, scales, block, streams)
            return out, x
    residual = norm.residual if norm is not None else None
    total = torch.empty_like(x) if residual is not None else x
    if tile is None and scales is not None:
        tile = _tile8(num_outputs, block, gated)
    elif tile is None:
        tile = _tile(num_inputs, norm is not None)
    _gemv_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x,
        residual,
        total,
        norm.weight if norm is not None else None,
        norm.eps if norm is not None else 0.0,
        weight,
        scales,
        bias,
        out,
        num_outputs,
        num_inputs,
        weight.stride(0),
        0 if scales is None else scales.stride(0),
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        IS_GATED=gated,
        BLOCK_OUTPUTS=0 if block is None else block[0],
        BLOCK_INPUTS=0 if block is None else block[1],
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs if block is None else max(tile.inputs, block[1]),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(out),
    )
    return out, total
