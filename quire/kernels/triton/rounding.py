"""Inputs of linear layers rounded to 8 bits, as `InputRounding` says.

Kernels whose results are the inputs of such a layer round them in passing, by `store_rounded`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.torch.quantized_weights import SMALLEST_INPUT, InputRounding

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SMALLEST_INPUT = tl.constexpr(SMALLEST_INPUT)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added and subtracted, it rounds a float32 to the nearest integer, halves to even ones."""

GROUPED_TOKENS = 4
"""cuBLAS takes tokens whose inputs have scales by group in multiples of this."""


@dataclass(frozen=True)
class RoundedInput:
    """What a layer multiplies: `values` times the scale of their token, or of their group."""

    values: Tensor
    """float8_e4m3fn or int8 [room, inputs]."""
    scales: Tensor
    """float32 [groups, room]; one group if a token has one scale."""
    num_tokens: int
    """How many there are; the room for them may be larger, as cuBLAS wants it."""
    group_size: int | None
    dtype: torch.dtype
    """Of the inputs before, and of the result."""


@triton.jit
def to_float8(x):
    """float32 numbers, at most 448, as the nearest float8_e4m3fn."""
    if _IS_INTERPRETED:
        # The interpreter does not carry into exponents, so it gets numbers that need no rounding.
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        step = (exponent + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
        x = x + step - step
    return x.to(tl.float8e4nv)


@triton.jit
def store_rounded(
    x,
    row,
    columns,
    num_inputs,
    values_ptr,
    scales_ptr,
    stride_scales,
    fixed_ptr,
    zero_ptr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rounds x [WIDTH], the inputs `columns` of token `row`: whole groups, 0 beyond the last."""
    groups = tl.reshape(x.to(tl.float32), [WIDTH // GROUP, GROUP])
    first = tl.min(tl.reshape(columns, [WIDTH // GROUP, GROUP]), 1)
    if fixed_ptr is None:
        scale = tl.maximum(tl.max(tl.abs(groups), 1), _SMALLEST_INPUT) / LARGEST
    else:
        scale = tl.load(fixed_ptr + first * 0)
    tl.store(scales_ptr + first // GROUP * stride_scales + row, scale, first < num_inputs)
    rounded = groups / scale[:, None]
    if values_ptr.dtype.element_ty == tl.int8:
        rounded = rounded + _TO_INTEGER - _TO_INTEGER
        if zero_ptr is not None:
            rounded += tl.load(zero_ptr).to(tl.float32)
        values = tl.minimum(tl.maximum(rounded, -128.0), 127.0).to(tl.int8)
    else:
        values = to_float8(tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST))
    place = values_ptr + row * num_inputs + columns
    tl.store(place, tl.reshape(values, [WIDTH]), columns < num_inputs)


def empty_rounded(
    rounding: InputRounding, num_tokens: int, num_inputs: int, like: Tensor
) -> RoundedInput:
    groups, room = 1, num_tokens
    if rounding.group_size is not None:
        groups = triton.cdiv(num_inputs, rounding.group_size)
        room = triton.cdiv(num_tokens, GROUPED_TOKENS) * GROUPED_TOKENS
    return RoundedInput(
        torch.empty((room, num_inputs), dtype=rounding.dtype, device=like.device),
        torch.empty((groups, room), dtype=torch.float32, device=like.device),
        num_tokens,
        rounding.group_size,
        like.dtype,
    )


def rounding_options(
    scales: Tensor | None, rounding: InputRounding | None, width: int
) -> dict[str, Any]:
    """Arguments for `store_rounded` of a kernel that has `width` inputs at a time."""
    known = rounding is not None
    return {
        "scales_ptr": scales,
        "stride_scales": 0 if scales is None else scales.stride(0),
        "fixed_ptr": rounding.scale if known else None,
        "zero_ptr": rounding.zero if known else None,
        "GROUP": (rounding.group_size or width) if known else width,
        "LARGEST": rounding.largest if known else 0.0,
    }


@triton.jit
def _round_kernel(
    x_ptr,
    out_ptr,
    stride_x,
    num_inputs,
    scales_ptr,
    stride_scales,
    fixed_ptr,
    zero_ptr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    wait_for_inputs(OVERLAPS)
    x = tl.load(x_ptr + row * stride_x + columns, columns < num_inputs, 0.0)
    store_rounded(
        x,
        row,
        columns,
        num_inputs,
        out_ptr,
        scales_ptr,
        stride_scales,
        fixed_ptr,
        zero_ptr,
        GROUP,
        LARGEST,
        WIDTH,
    )


def round_inputs(x: Tensor, rounding: InputRounding) -> RoundedInput:
    """x [tokens, inputs] as a layer with this rounding takes it."""
    out = empty_rounded(rounding, *x.shape, x)
    width = max(triton.next_power_of_2(x.shape[1]), rounding.group_size or 1)
    _round_kernel[(len(x),)](
        x,
        out.values,
        x.stride(0),
        x.shape[1],
        WIDTH=width,
        num_warps=min(max(width // 512, 1), 16),
        **rounding_options(out.scales, rounding, width),
        **launch_options(out.values),
    )
    return out
