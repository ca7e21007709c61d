"""Products with weights of 8 bits in tiles: of inputs that are rounded to 8 bits too, or of
inputs as they are, for which weights are widened in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.finish_product import finish_product
from quire.kernels.triton.gemv import widen

PROGRAMS_WANTED = 384
MAX_PARTS = 4
STEPS_WORTHWHILE = 8
"""Of a program, at least, where inputs are divided."""
SIDE_BY_SIDE = 8
"""Tiles of tokens that are computed one after the other for the same outputs, so that the weights
of these are found in the L2 cache."""


@triton.jit(do_not_specialize=["num_tokens"])
def _scaled_tile_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    part_inputs,
    stride_x,
    stride_x_scales,
    stride_weight,
    stride_scales,
    stride_out,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
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
    begin = tl.program_id(1) * part_inputs
    wait_for_inputs(OVERLAPS)
    HAS_STEPS: tl.constexpr = BLOCK_INPUTS > 0 or GROUP > 0
    sum_type: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32 if HAS_STEPS else sum_type)
    # With a number of stages of its own, the loop loads scales ahead too, not factors alone.
    end = min(begin + part_inputs, num_inputs)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        in_columns = columns < num_inputs - start
        x = tl.load(x_rows + start, in_tokens[:, None] & in_columns[None, :], 0.0)
        weight = tl.load(weight_rows + start, in_outputs[:, None] & in_columns[None, :], 0.0)
        if x_scales_ptr is None:
            weight = widen(weight).to(x.dtype)
        if HAS_STEPS:
            # These inputs have common scales.
            part = tl.dot(x, weight.trans(), out_dtype=sum_type).to(tl.float32)
            scale = 1.0
            if BLOCK_INPUTS > 0:
                blocks = scales_ptr + first // BLOCK_OUTPUTS * stride_scales
                scale = tl.load(blocks + start // BLOCK_INPUTS)
            if GROUP > 0:
                groups = x_scales_ptr + start // GROUP * stride_x_scales
                total += part * (tl.load(groups + tokens, in_tokens, 0.0) * scale)[:, None]
            else:
                total += part * scale
        else:
            total = tl.dot(x, weight.trans(), total, out_dtype=sum_type)
    in_tile = in_tokens[:, None] & in_outputs[None, :]
    out_rows = out_ptr + (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[:, None] * stride_out
    if IS_WHOLE:
        total = total.to(tl.float32)
        if BLOCK_INPUTS == 0:
            total *= tl.load(scales_ptr + outputs, in_outputs, 0.0)[None, :]
        if x_scales_ptr is not None and GROUP == 0:
            total *= tl.load(x_scales_ptr + tokens, in_tokens, 0.0)[:, None]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + outputs, in_outputs, 0.0).to(tl.float32)[None, :]
    tl.store(out_rows + outputs[None, :], total.to(out_ptr.dtype.element_ty), in_tile)


class _Tile(NamedTuple):
    """What a program computes, how many inputs it takes at a time, and with how many warps."""

    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _tile(num_tokens: int, num_outputs: int, has_steps: bool) -> _Tile:
    """The quickest of those measured on an H200."""
    is_wide = num_outputs > 8192
    if num_tokens > 256 or (num_tokens > 64 and is_wide):
        return _Tile(64, 128, 128, 4, 4) if has_steps else _Tile(128, 128, 128, 8, 3)
    return _Tile(64, 128 if is_wide else 64, 128, 4, 4)


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
    group = group_size if group_size is not None and x_scales is not None else 0
    num_outputs, num_inputs = weight.shape
    tile = _tile(len(x), num_outputs, block is not None or group > 0)
    outputs = tile.outputs if block is None else min(tile.outputs, block[0])
    inputs = min(tile.inputs, block[1] if block is not None else tile.inputs, group or tile.inputs)
    programs = triton.cdiv(len(x), tile.tokens) * triton.cdiv(num_outputs, outputs)
    steps = triton.cdiv(num_inputs, inputs)
    num_parts = _num_parts(programs, steps)
    part_inputs = triton.cdiv(steps, num_parts) * inputs
    parts = out
    if num_parts > 1:
        is_int = x.dtype == torch.int8 and block is None and group == 0
        shape, dtype = (num_parts, *out.shape), torch.int32 if is_int else torch.float32
        parts = torch.empty(shape, dtype=dtype, device=x.device)
    _scaled_tile_kernel[(programs, num_parts)](
        x,
        x_scales,
        weight,
        scales,
        bias,
        parts,
        len(x),
        num_outputs,
        num_inputs,
        part_inputs,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        weight.stride(0),
        scales.stride(0),
        parts.stride(-2),
        BLOCK_OUTPUTS=0 if block is None else block[0],
        BLOCK_INPUTS=0 if block is None else block[1],
        GROUP=group,
        IS_WHOLE=num_parts == 1,
        TOKENS=tile.tokens,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SIDE_BY_SIDE=SIDE_BY_SIDE,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(out),
    )
    if num_parts > 1:
        token_scales = x_scales if group == 0 else None
        output_scales = scales if block is None else None
        finish_product(parts, token_scales, output_scales, bias, out)


def _num_parts(programs: int, steps: int) -> int:
    """Into how many parts inputs are divided among programs, so that all processors have some."""
    return max(1, min(PROGRAMS_WANTED // programs, steps // STEPS_WORTHWHILE, MAX_PARTS))
