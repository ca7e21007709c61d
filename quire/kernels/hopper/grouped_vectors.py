"""Products of few tokens with weights of 4 bits: the weights are read at memory speed.

Written in Gluon, Triton's lower level, because only there weights can be loaded from memory into
the very registers that tensor cores read, with no shared memory between. Each warp multiplies
spans of its own; what the warps of a program found is added at the end. The layout of the weights
is that of `kernels/triton/grouped_product.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.hopper.unpacking import RAISED_BFLOAT16, RAISED_FLOAT16
from quire.kernels.triton.grouped_product import FIELDS


@gluon.jit
def wait_for_inputs():
    """As in `overlap`, for kernels that are launched so."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1
    )


@gluon.jit
def code_offset(zero, dtype: gl.constexpr):
    """What unpacked codes are lessened by: the zero, and what the exponent stands for."""
    EXPONENT: gl.constexpr = 1024 if dtype == gl.float16 else 128
    return (zero + EXPONENT).to(dtype)


@gluon.jit
def _output(row, num_outputs, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr):
    """The output of a row of this program, and whether there is one. With a gate, the first half
    of the rows is of the gate, the other of the same outputs of `up`."""
    if IS_GATED:
        HALF: gl.constexpr = OUTPUTS // 2
        output = gl.program_id(0) * HALF + row % HALF
        return output + row // HALF * (num_outputs // 2), output < num_outputs // 2
    else:
        output = gl.program_id(0) * OUTPUTS + row
        return output, output < num_outputs


@gluon.jit
def load_group(pointers, a_place, place, a_mask, mask, ZERO: gl.constexpr):
    """Scale, zero and minimum of a group of each output."""
    scales_ptr, zeros_ptr, minima_ptr = pointers
    scale = gl.load(scales_ptr + place, mask, 0.0)
    if zeros_ptr is None:
        zero = gl.full(a_place.type.shape, ZERO, gl.float32, a_place.type.layout)
    else:
        zero = gl.load(zeros_ptr + a_place, a_mask, 0)
    minimum = scale if minima_ptr is None else gl.load(minima_ptr + place, mask, 0.0)
    return scale, zero, minimum


@gluon.jit
def _load_span(
    low_ptr, pointers, first, num_outputs, num_spans, PARTS: gl.constexpr,
    OUTPUTS: gl.constexpr, RUN: gl.constexpr, GROUP_RUNS: gl.constexpr, IS_GATED: gl.constexpr,
    a_layout: gl.constexpr, layout: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Elements and groups of the next spans."""
    a_rows: gl.constexpr = gl.SliceLayout(2, a_layout)
    a_span = first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, a_rows))[:, None]
    a_row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, a_rows))[None, :]
    a_output, in_a_outputs = _output(a_row, num_outputs, OUTPUTS, IS_GATED)
    run = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(0, a_layout)))
    a_mask = (a_span < num_spans) & in_a_outputs
    element = (a_span.to(gl.int64) * num_outputs + a_output) * RUN
    words = gl.load(low_ptr + element[:, :, None] + run[None, :][None, :, :], a_mask[:, :, None], 0)
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    span = first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, rows))[:, None]
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, rows))[None, :]
    output, in_outputs = _output(row, num_outputs, OUTPUTS, IS_GATED)
    mask = (span < num_spans) & in_outputs
    place = (span * FIELDS // GROUP_RUNS).to(gl.int64) * num_outputs + output
    a_place = (a_span * FIELDS // GROUP_RUNS).to(gl.int64) * num_outputs + a_output
    groups = (load_group(pointers, a_place, place, a_mask, mask, ZERO),)
    for group in gl.static_range(1, FIELDS // GROUP_RUNS):
        further = group * num_outputs
        one = load_group(pointers, a_place + further, place + further, a_mask, mask, ZERO)
        groups = groups + (one,)  # noqa: RUF005
    return words, groups


@gluon.jit
def unpack(words, FIELD: gl.constexpr, dtype: gl.constexpr):
    if dtype == gl.float16:
        return gl.inline_asm_elementwise(
            RAISED_FLOAT16[FIELD], "=r,r,r", [words], gl.float16, True, 2
        )
    else:
        return gl.inline_asm_elementwise(
            RAISED_BFLOAT16[FIELD], "=r,r,r", [words], gl.bfloat16, True, 2
        )


@gluon.jit
def lowering(zero, FIELD: gl.constexpr, dtype: gl.constexpr):
    """What takes the offset of raised codes, and the zero, out of products."""
    if dtype == gl.float16:
        OFFSET: gl.constexpr = 64 if FIELD % 2 else 1024
    else:
        OFFSET: gl.constexpr = 128
    return (-OFFSET - zero.to(gl.float32)).to(dtype)[:, :, None]


@gluon.jit
def _store(out_ptr, stride_out, values, num_tokens, num_outputs):
    SIZE: gl.constexpr = values.type.shape[0]
    TOKENS: gl.constexpr = values.type.shape[1]
    layout: gl.constexpr = values.type.layout
    output = gl.program_id(0) * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    target = out_ptr + (token * stride_out)[None, :] + output[:, None]
    mask = (output < num_outputs)[:, None] & (token < num_tokens)[None, :]
    gl.store(target, values.to(out_ptr.dtype.element_ty), mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def vectors_kernel(
    x_ptr,
    low_ptr,
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
    ZERO: gl.constexpr,
    RUN: gl.constexpr,
    GROUP_RUNS: gl.constexpr,
    PARTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    TOKENS: gl.constexpr,
    IS_GATED: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    OVERLAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, WIDTH)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, WIDTH)
    pointers = (scales_ptr, zeros_ptr, minima_ptr)
    # Weights are read ahead, the first of them before the inputs are there.
    words, groups = _load_span(
        low_ptr, pointers, 0, num_outputs, num_spans, PARTS, OUTPUTS, RUN, GROUP_RUNS, IS_GATED,
        a_layout, layout, ZERO,
    )  # fmt: skip
    if OVERLAPS:
        wait_for_inputs()
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, b_layout)))
    run = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(2, b_layout)))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(0, b_layout)))
    in_tokens = (token < num_tokens)[None, :][None, :, :]
    x_ptrs = x_ptr + (token * stride_x)[None, :][None, :, :]
    acc = gl.zeros([PARTS, OUTPUTS, TOKENS], gl.float32, layout)
    ones = gl.full([PARTS, OUTPUTS, RUN], 1.0, dtype, a_layout)
    for first in range(0, num_spans, PARTS):
        next_words, next_groups = _load_span(
            low_ptr, pointers, first + PARTS, num_outputs, num_spans, PARTS,
            OUTPUTS, RUN, GROUP_RUNS, IS_GATED, a_layout, layout, ZERO,
        )  # fmt: skip
        for field in gl.static_range(FIELDS):
            scale, zero, minimum = groups[field // GROUP_RUNS]
            if field % GROUP_RUNS == 0:
                product = gl.zeros([PARTS, OUTPUTS, TOKENS], gl.float32, layout)
                total = product
            at = (((first + part) * FIELDS + field) * RUN)[:, None] + run[None, :]
            mask = in_tokens
            if not IS_WHOLE:
                mask = (at < num_inputs)[:, :, None] & in_tokens
            x = gl.load(x_ptrs + at[:, :, None], mask, 0.0)
            product = mma_v2(unpack(words, field, dtype), x, product)
            lowered = gl.broadcast(lowering(zero, field, dtype), ones)[0]
            product = mma_v2(lowered, x, product)
            if minima_ptr is not None:
                total = mma_v2(ones, x, total)
            if (field + 1) % GROUP_RUNS == 0 or field == FIELDS - 1:
                acc += product * scale.to(gl.float32)[:, :, None]
                if minima_ptr is not None:
                    acc += total * minimum.to(gl.float32)[:, :, None]
        words = next_words
        groups = next_groups
    total = gl.sum(acc, 0)
    flat: gl.constexpr = total.type.layout
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, flat))
    output, in_outputs = _output(row, num_outputs, OUTPUTS, IS_GATED)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + output, in_outputs, 0.0).to(gl.float32)[:, None]
    if IS_GATED:
        HALF: gl.constexpr = OUTPUTS // 2
        gate, up = gl.split(total.reshape([2, HALF, TOKENS]).permute([1, 2, 0]))
        gated = gate / (1.0 + gl.exp(-gate)) * up
        _store(out_ptr, stride_out, gated, num_tokens, num_outputs // 2)
    else:
        _store(out_ptr, stride_out, total, num_tokens, num_outputs)
