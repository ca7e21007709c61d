"""Products with weights of a few bits: read as codes, turned into numbers in registers.

A matrix is cut into spans of 8 * RUN inputs. An element of a plane holds the bits of eight inputs
that lie RUN apart, so that each shift of a tile of elements is a tile of RUN adjacent inputs, and
the product of a span the sum of eight. Codes of 1, 2 and 4 bits are one plane of elements of 8, 16
and 32 bits; others are split into two.

Results are computed as W x^T: the numbers that come from codes are then the operand that tensor
cores take from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.hopper.overlap import wait_for_inputs
from quire.kernels.hopper.unpacking import unpack_codes

FIELDS = tl.constexpr(8)
"""Inputs of an element."""


@triton.jit
def _decode(
    low,
    high,
    FIELD: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
):
    """The numbers that the codes of a field stand for, in float32."""
    code = (low.to(tl.int32) >> (LOW_BITS * FIELD)) & ((1 << LOW_BITS) - 1)
    if HIGH_BITS > 0:
        upper = (high.to(tl.int32) >> (HIGH_BITS * FIELD)) & ((1 << HIGH_BITS) - 1)
        code |= upper << LOW_BITS
    if IS_E2M1:
        # Exponent and mantissa where float32 has them; its exponents are 126 greater.
        bits = ((code & 7) << 22) | ((code >> 3) << 31)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return code.to(tl.float32)


@triton.jit
def multiply_rows(
    x_rows,
    in_tokens,
    order_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    minima_ptr,
    outputs,
    in_outputs,
    num_outputs,
    num_inputs,
    num_spans,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """[OUTPUTS, TOKENS] of some rows of a matrix of `num_outputs`; x_rows [1, TOKENS] are where the
    tokens' inputs begin, which lie in an order of their own if one is given."""
    run = tl.arange(0, RUN)
    dtype: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    wide_outputs = num_outputs.to(tl.int64)
    for span in range(num_spans):
        elements = (span * wide_outputs + outputs)[:, None] * RUN + run[None, :]
        low = tl.load(low_ptr + elements, in_outputs[:, None], 0)
        high = low
        if high_ptr is not None:
            high = tl.load(high_ptr + elements, in_outputs[:, None], 0)
        partial = acc
        scale = tl.zeros([OUTPUTS], tl.float32)
        zero = tl.full([OUTPUTS], ZERO, tl.float32)
        minimum = tl.zeros([OUTPUTS], tl.float32)
        for field in tl.static_range(FIELDS):
            if field * RUN % (GROUP_RUNS * RUN) == 0:
                group = (span * FIELDS + field) // GROUP_RUNS * wide_outputs
                scale = tl.load(scales_ptr + group + outputs, in_outputs, 0.0).to(tl.float32)
                if zeros_ptr is not None:
                    zero = tl.load(zeros_ptr + group + outputs, in_outputs, 0).to(tl.float32)
                if minima_ptr is not None:
                    minimum = tl.load(minima_ptr + group + outputs, in_outputs, 0.0).to(tl.float32)
                partial = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            if NATIVE:
                value = unpack_codes(low, zero[:, None], field, dtype)
            else:
                value = _decode(low, high, field, LOW_BITS, HIGH_BITS, IS_E2M1) - zero[:, None]
                if minima_ptr is None:
                    value = value.to(dtype)
            at = (span * FIELDS + field) * RUN + run
            in_inputs = at < num_inputs
            if order_ptr is not None:
                at = tl.load(order_ptr + at, in_inputs, 0)
            x = tl.load(x_rows + at[:, None], in_tokens[None, :] & in_inputs[:, None], 0.0)
            if minima_ptr is None:
                partial = tl.dot(value, x, partial, input_precision="ieee")
                if (field + 1) % GROUP_RUNS == 0 or field == FIELDS - 1:
                    acc += partial * scale[:, None]
            else:
                wide = value.to(tl.float32) * scale[:, None] + minimum[:, None]
                acc = tl.dot(wide.to(dtype), x, acc, input_precision="ieee")
    return acc


# Numbers differ from step to step; a kernel for each of their divisors would be compiled while
# requests wait.
@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    num_spans,
    stride_x,
    stride_out,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    tile = tl.program_id(0)
    tokens = tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    outputs = tile // token_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    in_tokens = tokens < num_tokens
    in_outputs = outputs < num_outputs
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * stride_x
    wait_for_inputs(OVERLAPS)
    acc = multiply_rows(
        x_rows,
        in_tokens,
        None,
        low_ptr,
        high_ptr,
        scales_ptr,
        zeros_ptr,
        minima_ptr,
        outputs,
        in_outputs,
        num_outputs,
        num_inputs,
        num_spans,
        LOW_BITS,
        HIGH_BITS,
        IS_E2M1,
        ZERO,
        RUN,
        GROUP_RUNS,
        OUTPUTS,
        TOKENS,
        NATIVE,
    )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, in_outputs, 0.0).to(tl.float32)[:, None]
    places = out_ptr + tokens.to(tl.int64)[None, :] * stride_out + outputs[:, None]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), in_outputs[:, None] & in_tokens[None, :])


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _dequantize_kernel(
    rows_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    minima_ptr,
    out_ptr,
    first_row,
    num_rows,
    num_outputs,
    num_inputs,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    span = tl.program_id(1)
    places = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows = places < num_rows
    run = tl.arange(0, RUN)
    wait_for_inputs(OVERLAPS)
    if rows_ptr is None:
        outputs = first_row + places
    else:
        outputs = tl.load(rows_ptr + places, in_rows, 0).to(tl.int32)
    wide_outputs = num_outputs.to(tl.int64)
    elements = (span * wide_outputs + outputs)[:, None] * RUN + run[None, :]
    low = tl.load(low_ptr + elements, in_rows[:, None], 0)
    high = low
    if high_ptr is not None:
        high = tl.load(high_ptr + elements, in_rows[:, None], 0)
    for field in tl.static_range(FIELDS):
        group = (span * FIELDS + field) // GROUP_RUNS * wide_outputs + outputs
        scale = tl.load(scales_ptr + group, in_rows, 0.0).to(tl.float32)
        value = _decode(low, high, field, LOW_BITS, HIGH_BITS, IS_E2M1)
        if zeros_ptr is not None:
            value -= tl.load(zeros_ptr + group, in_rows, 0).to(tl.float32)[:, None]
        else:
            value -= ZERO
        value *= scale[:, None]
        if minima_ptr is not None:
            value += tl.load(minima_ptr + group, in_rows, 0.0).to(tl.float32)[:, None]
        at = (span * FIELDS + field) * RUN + run
        target = out_ptr + places.to(tl.int64)[:, None] * num_inputs + at[None, :]
        mask = in_rows[:, None] & (at < num_inputs)[None, :]
        tl.store(target, value.to(out_ptr.dtype.element_ty), mask)
