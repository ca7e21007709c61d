"""Products of few tokens with weights of 4 bits, whose words come through shared memory.

`grouped_vectors` loads words straight into registers; the compiler then moves the loads of the next
spans to the end of the work on these, and every span waits for memory. Here the tensor memory
accelerator fills a ring of stages, as far ahead as the ring is long, also into the next outputs: a
program goes on from tile to tile. Sums of the fields of a span do not wait for each other.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.hopper.grouped_vectors import load_group, lowering, unpack, wait_for_inputs
from quire.kernels.hopper.loader import load_box
from quire.kernels.hopper.prefill_attention import barrier
from quire.kernels.triton.grouped_product import FIELDS


@gluon.jit
def _outputs(tile, row, num_outputs, OUTPUTS: gl.constexpr, HALVES: gl.constexpr):
    """The outputs of a tile's rows, and whether there are any. With a gate, the first half of the
    rows is of the gate, the other of the same outputs of `up`."""
    SIZE: gl.constexpr = OUTPUTS // HALVES
    place = tile * SIZE + row % SIZE
    return place + row // SIZE * (num_outputs // HALVES), place < num_outputs // HALVES


@gluon.jit
def _fill(low_desc, words, full, count, tile, first):
    """Start loading the words of a step."""
    PARTS: gl.constexpr = words.type.shape[1]
    HALVES: gl.constexpr = words.type.shape[2]
    SIZE: gl.constexpr = words.type.shape[3]
    RUN: gl.constexpr = words.type.shape[4]
    stage = count % words.type.shape[0]
    mbarrier.expect(full.index(stage), PARTS * HALVES * SIZE * RUN * 4)
    load_box(low_desc, [first, 0, tile * SIZE, 0], full.index(stage), words.index(stage))


@gluon.jit
def _after(tile, first, num_spans, PARTS: gl.constexpr):
    """The step after this one."""
    is_over = first + PARTS >= num_spans
    return gl.where(is_over, tile + gl.num_programs(0), tile), gl.where(is_over, 0, first + PARTS)


@gluon.jit
def _load_groups(
    pointers, tile, first, num_outputs, num_spans, PARTS: gl.constexpr, OUTPUTS: gl.constexpr,
    HALVES: gl.constexpr, GROUP_RUNS: gl.constexpr, ZERO: gl.constexpr, a_layout: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Scales, zeros and minima of a step; of no step, nothing."""
    a_rows: gl.constexpr = gl.SliceLayout(2, a_layout)
    a_span = first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, a_rows))[:, None]
    a_row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, a_rows))[None, :]
    a_output, in_a_outputs = _outputs(tile, a_row, num_outputs, OUTPUTS, HALVES)
    a_mask = (a_span < num_spans) & in_a_outputs
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    span = first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, rows))[:, None]
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, rows))[None, :]
    output, in_outputs = _outputs(tile, row, num_outputs, OUTPUTS, HALVES)
    mask = (span < num_spans) & in_outputs
    place = (span * FIELDS // GROUP_RUNS).to(gl.int64) * num_outputs + output
    a_place = (a_span * FIELDS // GROUP_RUNS).to(gl.int64) * num_outputs + a_output
    groups = (load_group(pointers, a_place, place, a_mask, mask, ZERO),)
    for group in gl.static_range(1, FIELDS // GROUP_RUNS):
        further = group * num_outputs
        one = load_group(pointers, a_place + further, place + further, a_mask, mask, ZERO)
        groups = groups + (one,)  # noqa: RUF005
    return groups


@gluon.jit
def _load_inputs(
    x_ptr, stride_x, num_tokens, num_inputs, first_input, PARTS: gl.constexpr, RUN: gl.constexpr,
    TOKENS: gl.constexpr, IS_ONE: gl.constexpr, IS_WHOLE: gl.constexpr, held: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Those of a field of each part, [PARTS, RUN, TOKENS] in the order of tensor cores; of a single
    token in every column."""
    rows: gl.constexpr = gl.SliceLayout(2, held)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, rows))[:, None]
    run = gl.arange(0, RUN, layout=gl.SliceLayout(0, rows))[None, :]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(0, held)))
    token = token[None, :][None, :, :]
    # What does not change from step to step is added first, so that it is computed once.
    at = (part * (FIELDS * RUN) + run)[:, :, None]
    mask = token < (TOKENS if IS_ONE else num_tokens)
    if not IS_WHOLE:
        mask = mask & (at + first_input < num_inputs)
    offset = token * 0 if IS_ONE else token * stride_x
    ptrs = x_ptr + offset + at + first_input
    x = gl.load(ptrs) if IS_ONE and IS_WHOLE else gl.load(ptrs, mask, 0.0)
    by_thread = x.reshape([PARTS, RUN // 32, 4, 2, 2, 2, TOKENS]).permute([0, 1, 3, 4, 2, 5, 6])
    return gl.convert_layout(by_thread.reshape([PARTS, RUN, TOKENS]), layout)


@gluon.jit
def _load_words(words, OUTPUTS: gl.constexpr, held: gl.constexpr, layout: gl.constexpr):
    """[PARTS, OUTPUTS, RUN] in the order of tensor cores."""
    PARTS: gl.constexpr = words.type.shape[0]
    RUN: gl.constexpr = words.type.shape[3]
    found = words.reshape([PARTS, OUTPUTS, RUN]).load(held)
    by_thread = found.reshape([PARTS, OUTPUTS, RUN // 32, 4, 2, 2, 2])
    by_thread = by_thread.permute([0, 1, 2, 4, 5, 3, 6])
    return gl.convert_layout(by_thread.reshape([PARTS, OUTPUTS, RUN]), layout)


@gluon.jit
def _finish(
    out_ptr, bias_ptr, acc, tile, num_tokens, num_outputs, stride_out, HALVES: gl.constexpr
):
    """Add up what the warps found of a tile, and store it."""
    OUTPUTS: gl.constexpr = acc.type.shape[1]
    TOKENS: gl.constexpr = acc.type.shape[2]
    SIZE: gl.constexpr = OUTPUTS // HALVES
    total = gl.sum(acc, 0)
    flat: gl.constexpr = total.type.layout
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, flat))
    output, in_outputs = _outputs(tile, row, num_outputs, OUTPUTS, HALVES)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + output, in_outputs, 0.0).to(gl.float32)[:, None]
    if HALVES == 2:
        gate, up = gl.split(total.reshape([2, SIZE, TOKENS]).permute([1, 2, 0]))
        total = gate / (1.0 + gl.exp(-gate)) * up
    layout: gl.constexpr = total.type.layout
    output = tile * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    target = out_ptr + (token * stride_out)[None, :] + output[:, None]
    mask = (output < num_outputs // HALVES)[:, None] & (token < num_tokens)[None, :]
    gl.store(target, total.to(out_ptr.dtype.element_ty), mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def stream_kernel(
    x_ptr,
    low_desc,
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
    GROUP_RUNS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS_HELD: gl.constexpr,
    INPUTS_HELD: gl.constexpr,
    IS_ONE: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    OVERLAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    PARTS: gl.constexpr = low_desc.block_shape[0]
    HALVES: gl.constexpr = low_desc.block_shape[1]
    OUTPUTS: gl.constexpr = low_desc.block_shape[2] * HALVES
    RUN: gl.constexpr = low_desc.block_shape[3]
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    pointers = (scales_ptr, zeros_ptr, minima_ptr)
    words_smem = gl.allocate_shared_memory(
        gl.int32, [STAGES, PARTS, HALVES, OUTPUTS // HALVES, RUN], low_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    barrier()
    tiles = gl.cdiv(num_outputs // HALVES, OUTPUTS // HALVES)
    steps = gl.cdiv(num_spans, PARTS)
    total = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * steps
    # Weights are read ahead, the first of them before the inputs are there.
    tile, first = gl.program_id(0), 0
    coming_tile, coming_first = tile, 0
    for count in gl.static_range(STAGES):
        if count < total:
            _fill(low_desc, words_smem, full, count, coming_tile, coming_first)
        coming_tile, coming_first = _after(coming_tile, coming_first, num_spans, PARTS)
    groups = _load_groups(
        pointers, tile, first, num_outputs, num_spans, PARTS, OUTPUTS, HALVES, GROUP_RUNS, ZERO,
        a_layout, layout,
    )  # fmt: skip
    if OVERLAPS:
        wait_for_inputs()
    zeros = gl.zeros([PARTS, OUTPUTS, TOKENS], gl.float32, layout)
    ones = gl.full([PARTS, OUTPUTS, RUN], 1.0, dtype, a_layout)
    acc = zeros
    for count in range(total):
        next_tile, next_first = _after(tile, first, num_spans, PARTS)
        next_groups = _load_groups(
            pointers, next_tile, next_first, num_outputs, num_spans, PARTS, OUTPUTS, HALVES,
            GROUP_RUNS, ZERO, a_layout, layout,
        )  # fmt: skip
        mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
        words = _load_words(words_smem.index(count % STAGES), OUTPUTS, WORDS_HELD, a_layout)
        barrier()
        if count + STAGES < total:
            _fill(low_desc, words_smem, full, count, coming_tile, coming_first)
        coming_tile, coming_first = _after(coming_tile, coming_first, num_spans, PARTS)
        product, inputs = zeros, zeros
        for field in gl.static_range(FIELDS):
            scale, zero, minimum = groups[field // GROUP_RUNS]
            x = _load_inputs(
                x_ptr, stride_x, num_tokens, num_inputs, (first * FIELDS + field) * RUN,
                PARTS, RUN, TOKENS, IS_ONE, IS_WHOLE, INPUTS_HELD, b_layout,
            )  # fmt: skip
            one = mma_v2(unpack(words, field, dtype), x, zeros)
            one = mma_v2(gl.broadcast(lowering(zero, field, dtype), ones)[0], x, one)
            product = one if field % GROUP_RUNS == 0 else product + one
            if minima_ptr is not None:
                of_x = mma_v2(ones, x, zeros)
                inputs = of_x if field % GROUP_RUNS == 0 else inputs + of_x
            if (field + 1) % GROUP_RUNS == 0 or field == FIELDS - 1:
                acc += product * scale.to(gl.float32)[:, :, None]
                if minima_ptr is not None:
                    acc += inputs * minimum.to(gl.float32)[:, :, None]
        if next_first == 0:
            _finish(out_ptr, bias_ptr, acc, tile, num_tokens, num_outputs, stride_out, HALVES)
            acc = zeros
        tile, first, groups = next_tile, next_first, next_groups


def held_by_threads(
    parts: int, run: int
) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """Which words and which inputs a thread loads: eight neighbours at a time, where tensor cores
    want four pairs that lie apart. As both are in the same order, products are the same."""
    further = [1 << bit for bit in range(5, run.bit_length() - 1)]
    warps = [1 << bit for bit in range(parts.bit_length() - 1)]
    words = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], *([0, 0, one] for one in further), [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[one, 0, 0] for one in warps],
        [],
        [parts, 16, run],
    )
    inputs = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], *([0, one, 0] for one in further)],
        [[0, 8, 0], [0, 16, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[one, 0, 0] for one in warps],
        [],
        [parts, run, 8],
    )
    return words, inputs


def words_descriptor(elements: Tensor, parts: int, outputs: int, gated: bool) -> TensorDescriptor:
    """Of the boxes of elements [spans, outputs, RUN] that the kernel loads."""
    spans, num_outputs, run = elements.shape
    halves = 2 if gated else 1
    return TensorDescriptor.from_tensor(
        elements.view(spans, halves, num_outputs // halves, run),
        [parts, halves, outputs // halves, run],
        gl.NVMMASharedLayout(128, 32, 4),
    )
