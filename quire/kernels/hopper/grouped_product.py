"""Products of a batch with weights of 4 bits for Hopper: loads, unpacking and matrix products at
the same time.

Written in Gluon, Triton's lower level, because only there a matrix product can go on while the next
numbers are unpacked. One warp loads: elements of a span of inputs, and the inputs of its eight
fields one after the other. Two groups of four warps multiply, each with 64 outputs. The layout of
the weights is that of `kernels/triton/grouped_product.py`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.hopper.grouped_vectors import code_offset, wait_for_inputs
from quire.kernels.hopper.loader import load_box
from quire.kernels.hopper.prefill_attention import barrier
from quire.kernels.hopper.unpacking import TO_BFLOAT16, TO_FLOAT16
from quire.kernels.triton.grouped_product import FIELDS

ROWS = gl.constexpr(64)
"""Outputs of a group of warps."""


@gluon.jit
def _load_tiles(x_desc, low_desc, buffers, barriers, place, OVERLAPS: gl.constexpr):
    """Fill the buffers for the spans of a tile."""
    x_smem, low_smem = buffers
    x_full, x_empty, low_full, low_empty = barriers
    first_token, first_output, num_outputs, first, last = place
    X_STAGES: gl.constexpr = x_full.type.shape[0]
    X_FIELDS: gl.constexpr = x_smem.type.shape[0] // X_STAGES
    TOKENS: gl.constexpr = x_smem.type.shape[1]
    RUN: gl.constexpr = x_smem.type.shape[2]
    STAGES: gl.constexpr = low_smem.type.shape[0]
    OUTPUTS: gl.constexpr = low_smem.type.shape[1]
    count = 0
    for span in range(first, last):
        stage = (span - first) % STAGES
        mbarrier.wait(low_empty.index(stage), (((span - first) // STAGES) & 1) ^ 1)
        mbarrier.expect(low_full.index(stage), OUTPUTS * RUN * 4)
        row = span * num_outputs + first_output
        load_box(low_desc, [row, 0], low_full.index(stage), low_smem.index(stage))
        if OVERLAPS:  # noqa: SIM102 (known when compiled)
            if span == first:
                wait_for_inputs()
        for step in gl.static_range(FIELDS // X_FIELDS):
            x_stage = count % X_STAGES
            mbarrier.wait(x_empty.index(x_stage), ((count // X_STAGES) & 1) ^ 1)
            mbarrier.expect(x_full.index(x_stage), X_FIELDS * TOKENS * RUN * 2)
            for field in gl.static_range(X_FIELDS):
                column = (span * FIELDS + step * X_FIELDS + field) * RUN
                target = x_smem.index(x_stage * X_FIELDS + field)
                load_box(x_desc, [first_token, column], x_full.index(x_stage), target)
            count += 1


@gluon.jit
def _release(empty, count):
    """All warps of the group are done with a buffer."""
    barrier()
    mbarrier.arrive(empty.index(count % empty.type.shape[0]), count=1)


@gluon.jit
def _load_group(pointers, place, in_outputs, dtype: gl.constexpr, ZERO: gl.constexpr):
    """Scale, offset and minimum of a group of each output."""
    scales_ptr, zeros_ptr, minima_ptr = pointers
    scale = gl.load(scales_ptr + place, in_outputs, 0.0)
    if zeros_ptr is None:
        zero = gl.full(scale.type.shape, ZERO, gl.float32, scale.type.layout)
    else:
        zero = gl.load(zeros_ptr + place, in_outputs, 0).to(gl.float32)
    minimum = scale if minima_ptr is None else gl.load(minima_ptr + place, in_outputs, 0.0)
    return scale, code_offset(zero, dtype), minimum


@gluon.jit
def _load_groups(
    pointers, span, num_outputs, outputs,
    GROUP_RUNS: gl.constexpr, dtype: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Those of all groups of a span."""
    in_outputs = outputs < num_outputs
    place = (span * FIELDS // GROUP_RUNS).to(gl.int64) * num_outputs + outputs
    groups = (_load_group(pointers, place, in_outputs, dtype, ZERO),)
    for group in gl.static_range(1, FIELDS // GROUP_RUNS):
        further = place + group * num_outputs
        groups = groups + (  # noqa: RUF005
            _load_group(pointers, further, in_outputs, dtype, ZERO),
        )
    return groups


@gluon.jit
def _unpack(words, group, FIELD: gl.constexpr, dtype: gl.constexpr, HAS_MINIMA: gl.constexpr):
    """The weights of a field."""
    scale, offset, minimum = group
    if dtype == gl.float16:
        value = gl.inline_asm_elementwise(
            TO_FLOAT16[FIELD], "=r,r,r,r", [words, offset[:, None]], gl.float16, True, 2
        )
    else:
        value = gl.inline_asm_elementwise(
            TO_BFLOAT16[FIELD], "=r,r,r,r", [words, offset[:, None]], gl.bfloat16, True, 2
        )
    if scale.dtype == dtype and not HAS_MINIMA:
        return value * scale[:, None]
    wide = value.to(gl.float32) * scale.to(gl.float32)[:, None]
    if HAS_MINIMA:
        wide += minimum.to(gl.float32)[:, None]
    return wide.to(dtype)


@gluon.jit
def _multiply(
    out_ptr,
    bias_ptr,
    partial_ptr,
    count_ptr,
    pointers,
    buffers,
    barriers,
    place,
    num_tokens,
    stride_out,
    splits,
    GROUP_RUNS: gl.constexpr,
    ZERO: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    PART: gl.constexpr,
):
    """Multiply one half of the outputs of a tile."""
    x_smem, low_smem = buffers
    x_full, x_empty, low_full, low_empty = barriers
    first_token, first_output, num_outputs, first, last = place
    X_STAGES: gl.constexpr = x_full.type.shape[0]
    X_FIELDS: gl.constexpr = x_smem.type.shape[0] // X_STAGES
    TOKENS: gl.constexpr = x_smem.type.shape[1]
    STAGES: gl.constexpr = low_smem.type.shape[0]
    dtype: gl.constexpr = x_smem.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    HAS_MINIMA: gl.constexpr = pointers[2] is not None
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, a_layout))
    outputs = first_output + PART * ROWS + rows
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    count = 0
    groups = _load_groups(pointers, first, num_outputs, outputs, GROUP_RUNS, dtype, ZERO)
    for span in range(first, last):
        coming = gl.minimum(span + 1, last - 1)
        next_groups = _load_groups(pointers, coming, num_outputs, outputs, GROUP_RUNS, dtype, ZERO)
        stage = (span - first) % STAGES
        mbarrier.wait(low_full.index(stage), ((span - first) // STAGES) & 1)
        words = low_smem.index(stage).slice(PART * ROWS, ROWS).load(a_layout)
        _release(low_empty, span - first)
        for field in gl.static_range(FIELDS):
            weight = _unpack(words, groups[field // GROUP_RUNS], field, dtype, HAS_MINIMA)
            x_stage = count % X_STAGES
            if field % X_FIELDS == 0:
                mbarrier.wait(x_full.index(x_stage), (count // X_STAGES) & 1)
            x = x_smem.index(x_stage * X_FIELDS + field % X_FIELDS).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, is_async=True)
            if field == 0:
                before = weight
            else:
                # The field before is done, this one's product goes on.
                acc, before = warpgroup_mma_wait(1, [acc, before])
                if field % X_FIELDS == 0:
                    _release(x_empty, count - 1)
            before = weight
            if field % X_FIELDS == X_FIELDS - 1:
                count += 1
        # If products went on into the next span, the assembler would wait for each of them.
        acc, before = warpgroup_mma_wait(0, [acc, before])
        _release(x_empty, count - 1)
        groups = next_groups
    outputs = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    is_last = True
    if IS_SPLIT:
        tile = gl.program_id(0) * (low_smem.type.shape[1] // ROWS) + PART
        partial = partial_ptr + tile.to(gl.int64) * splits * (ROWS * TOKENS)
        partial += outputs[:, None] * TOKENS + columns[None, :]
        gl.store(partial + gl.program_id(1) * (ROWS * TOKENS), acc)
        barrier()
        arrived = gl.atomic_add(count_ptr + tile, 1)
        is_last = arrived == splits - 1
        if is_last:
            acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
            for one in range(splits):
                acc += gl.load(partial + one * (ROWS * TOKENS), cache_modifier=".cg")
            gl.store(count_ptr + tile, 0)
    if is_last:
        outputs = first_output + PART * ROWS + outputs
        tokens = first_token + columns
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + outputs, outputs < num_outputs, 0.0).to(gl.float32)[:, None]
        target = out_ptr + tokens.to(gl.int64)[None, :] * stride_out + outputs[:, None]
        mask = (outputs < num_outputs)[:, None] & (tokens < num_tokens)[None, :]
        gl.store(target, acc.to(dtype), mask)


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def product_kernel(
    x_desc,
    low_desc,
    scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    num_tokens,
    num_outputs,
    num_spans,
    stride_out,
    splits,
    ZERO: gl.constexpr,
    GROUP_RUNS: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    X_STAGES: gl.constexpr,
    X_FIELDS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    TOKENS: gl.constexpr = x_desc.block_shape[0]
    RUN: gl.constexpr = x_desc.block_shape[1]
    one: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [X_STAGES * X_FIELDS, TOKENS, RUN], x_desc.layout
    )
    low_smem = gl.allocate_shared_memory(gl.int32, [STAGES, GROUPS * ROWS, RUN], low_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], one)
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], one)
    low_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    low_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(x_empty.index(stage), count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(low_full.index(stage), count=1)
        mbarrier.init(low_empty.index(stage), count=GROUPS)
    token_tiles = gl.cdiv(num_tokens, TOKENS)
    tile, split = gl.program_id(0), gl.program_id(1)
    place = (
        tile % token_tiles * TOKENS,
        tile // token_tiles * (GROUPS * ROWS),
        num_outputs,
        num_spans * split // splits,
        num_spans * (split + 1) // splits,
    )
    pointers = (scales_ptr, zeros_ptr, minima_ptr)
    buffers = (x_smem, low_smem)
    barriers = (x_full, x_empty, low_full, low_empty)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, bias_ptr, partial_ptr, count_ptr, pointers, buffers,
                             barriers, place, num_tokens, stride_out, splits, GROUP_RUNS, ZERO,
                             IS_SPLIT, 0)),
                (_load_tiles, (x_desc, low_desc, buffers, barriers, place, OVERLAPS)),
            ],
            [1],
            [LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, bias_ptr, partial_ptr, count_ptr, pointers, buffers,
                             barriers, place, num_tokens, stride_out, splits, GROUP_RUNS, ZERO,
                             IS_SPLIT, 0)),
                (_multiply, (out_ptr, bias_ptr, partial_ptr, count_ptr, pointers, buffers,
                             barriers, place, num_tokens, stride_out, splits, GROUP_RUNS, ZERO,
                             IS_SPLIT, 1)),
                (_load_tiles, (x_desc, low_desc, buffers, barriers, place, OVERLAPS)),
            ],
            [4, 1],
            [REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip


def descriptors(
    x: Tensor, elements: Tensor, tokens: int, outputs: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the boxes of x [tokens, inputs] and of elements [outputs and spans, RUN] that the kernel
    loads."""
    run = elements.shape[1]
    return (
        TensorDescriptor.from_tensor(
            x, [tokens, run], gl.NVMMASharedLayout(min(128, 2 * run), 16, 2)
        ),
        TensorDescriptor.from_tensor(
            elements, [outputs, run], gl.NVMMASharedLayout(min(128, 4 * run), 32, 2)
        ),
    )
