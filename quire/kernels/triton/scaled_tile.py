"""Products with weights of 8 bits in tiles: of inputs that are rounded to 8 bits too, or of
inputs as they are, for which weights are widened in registers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.gemv import widen

SIDE_BY_SIDE = 8
"""Tiles of tokens that are computed one after the other for the same outputs, so that the weights
of these are found in the L2 cache."""


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    stride_x,
    stride_x_scales,
    stride_weight,
    stride_scales,
    stride_out,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    together = SIDE_BY_SIDE * tl.cdiv(num_outputs, OUTPUTS)
    before = tl.program_id(0) // together * SIDE_BY_SIDE
    side_by_side = min(token_tiles - before, SIDE_BY_SIDE)
    inside = tl.program_id(0) % together
    tokens = (before + inside % side_by_side) * TOKENS + tl.arange(0, TOKENS)
    first = inside // side_by_side * OUTPUTS
    outputs = first + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    in_tokens = tokens < num_tokens
    in_outputs = outputs < num_outputs
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_x + columns[None, :]
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * stride_weight + columns[None, :]
    wait_for_inputs(OVERLAPS)
    # Outputs come first: a product takes its first factor from registers, where it was widened.
    acc_type: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    acc = tl.zeros([OUTPUTS, TOKENS], acc_type)
    for start in range(0, num_inputs, INPUTS):
        in_columns = columns < num_inputs - start
        x = tl.load(x_rows + start, in_tokens[:, None] & in_columns[None, :], 0.0)
        weight = tl.load(weight_rows + start, in_outputs[:, None] & in_columns[None, :], 0.0)
        if x_scales_ptr is None:
            weight = widen(weight).to(x.dtype)
        if BLOCK_INPUTS == 0 and GROUP == 0:
            acc = tl.dot(weight, x.trans(), acc, out_dtype=acc_type)
        else:
            part = tl.dot(weight, x.trans(), out_dtype=acc_type).to(tl.float32)
            if BLOCK_INPUTS > 0:
                blocks = scales_ptr + first // BLOCK_OUTPUTS * stride_scales
                part *= tl.load(blocks + start // BLOCK_INPUTS)
            if GROUP > 0:
                of_group = x_scales_ptr + start // GROUP * stride_x_scales
                part *= tl.load(of_group + tokens, in_tokens, 0.0)[None, :]
            total += part
    if BLOCK_INPUTS == 0 and GROUP == 0:
        total = acc.to(tl.float32)
    if BLOCK_INPUTS == 0:
        total *= tl.load(scales_ptr + outputs, in_outputs, 0.0)[:, None]
    if x_scales_ptr is not None and GROUP == 0:
        total *= tl.load(x_scales_ptr + tokens, in_tokens, 0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, in_outputs, 0.0).to(tl.float32)[:, None]
    place = out_ptr + tokens.to(tl.int64)[:, None] * stride_out + outputs[None, :]
    result = total.trans().to(out_ptr.dtype.element_ty)
    tl.store(place, result, in_tokens[:, None] & in_outputs[None, :])


class _Tile(NamedTuple):
    """What a program computes, how many inputs it takes at a time, and with how many warps."""

    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _tile(num_tokens: int) -> _Tile:
    """The quickest of those measured on an H200."""
    if num_tokens <= 16:
        return _Tile(16, 64, 128, 4, 5)
    if num_tokens <= 64:
        return _Tile(64, 64, 128, 4, 4)
    return _Tile(128, 128, 128, 8, 3)


def scaled_product(
    x: Tensor,
    x_scales: Tensor | None,
    group_size: int | None,
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int] | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """out [tokens, outputs] = x W^T + bias, with W and its scales as in `ScaledWeights` and x as
    in `RoundedInput`, or as it is where it has no scales. Blocks and groups are powers of two."""
    tile = _tile(len(x))
    inputs, outputs = tile.inputs, tile.outputs
    if block is not None:
        inputs, outputs = min(inputs, block[1]), min(outputs, block[0])
    if group_size is not None:
        inputs = min(inputs, group_size)
    num_outputs, num_inputs = weight.shape
    _tile_kernel[(triton.cdiv(len(x), tile.tokens) * triton.cdiv(num_outputs, outputs),)](
        x,
        x_scales,
        weight,
        scales,
        bias,
        out,
        len(x),
        num_outputs,
        num_inputs,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        weight.stride(0),
        scales.stride(0),
        out.stride(0),
        BLOCK_OUTPUTS=0 if block is None else block[0],
        BLOCK_INPUTS=0 if block is None else block[1],
        GROUP=0 if x_scales is None or group_size is None else group_size,
        TOKENS=tile.tokens,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SIDE_BY_SIDE=SIDE_BY_SIDE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(out),
    )
