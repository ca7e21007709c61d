"""Matrix times vector, for weights that come through shared memory.

As `kernels/triton/gemv.py`, but the tensor memory accelerator reads ahead: as far as its ring of
stages is long, also into the next outputs, and before the inputs are there. A program goes on from
tile to tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.hopper.grouped_vectors import wait_for_inputs
from quire.kernels.hopper.loader import load_box
from quire.kernels.hopper.overlap import launch_options
from quire.kernels.hopper.prefill_attention import barrier
from quire.kernels.triton.grouped_matrix import multiprocessors

WARPS = 4
STEP_BYTES = WARPS * 32 * 16
"""Of an output in a step: each thread holds 16 bytes of neighbours."""


@gluon.jit
def _fill(weight_desc, weights, full, count, tile, first):
    """Start loading the weights of a step."""
    OUTPUTS: gl.constexpr = weights.type.shape[1]
    INPUTS: gl.constexpr = weights.type.shape[2]
    stage = count % weights.type.shape[0]
    mbarrier.expect(full.index(stage), OUTPUTS * INPUTS * weights.dtype.primitive_bitwidth // 8)
    load_box(weight_desc, [tile * OUTPUTS, first], full.index(stage), weights.index(stage))


@gluon.jit
def _after(tile, first, num_inputs, INPUTS: gl.constexpr):
    """The step after this one."""
    is_over = first + INPUTS >= num_inputs
    return gl.where(is_over, tile + gl.num_programs(0), tile), gl.where(is_over, 0, first + INPUTS)


@gluon.jit
def vector_kernel(
    x_ptr,
    weight_desc,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    stride_scales,
    BLOCK_OUTPUTS: gl.constexpr,
    BLOCK_INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """With BLOCK_INPUTS there is a scale for each block, else for each output, if any."""
    OUTPUTS: gl.constexpr = weight_desc.block_shape[0]
    INPUTS: gl.constexpr = weight_desc.block_shape[1]
    HELD: gl.constexpr = 128 // weight_desc.dtype.primitive_bitwidth
    RUNS: gl.constexpr = INPUTS // HELD
    layout: gl.constexpr = gl.BlockedLayout([1, HELD], [1, 32], [1, num_warps], [1, 0])
    weights_smem = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, OUTPUTS, INPUTS], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    barrier()
    tiles = gl.cdiv(num_outputs, OUTPUTS)
    steps = gl.cdiv(num_inputs, INPUTS)
    total = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * steps
    # Weights are read ahead, the first of them before the inputs are there.
    tile, first = gl.program_id(0), 0
    coming_tile, coming_first = tile, 0
    for count in gl.static_range(STAGES):
        if count < total:
            _fill(weight_desc, weights_smem, full, count, coming_tile, coming_first)
        coming_tile, coming_first = _after(coming_tile, coming_first, num_inputs, INPUTS)
    if OVERLAPS:
        wait_for_inputs()
    column = gl.arange(0, INPUTS, layout=gl.SliceLayout(0, layout))
    by_run: gl.constexpr = gl.SliceLayout(
        2, gl.BlockedLayout([1, 1, HELD], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    )
    run = gl.arange(0, RUNS, layout=gl.SliceLayout(0, by_run))
    zeros = gl.zeros([OUTPUTS, RUNS], gl.float32, by_run)
    acc = zeros
    for count in range(total):
        x = gl.load(x_ptr + first + column, first + column < num_inputs, 0.0).to(gl.float32)
        if BLOCK_INPUTS > 0:
            # The rows of a tile lie in one block.
            blocks = scales_ptr + tile * OUTPUTS // BLOCK_OUTPUTS * stride_scales
            place = first + run * HELD
            scale = gl.load(blocks + place // BLOCK_INPUTS, place < num_inputs, 0.0)
        mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
        weight = weights_smem.index(count % STAGES).load(layout)
        barrier()
        if count + STAGES < total:
            _fill(weight_desc, weights_smem, full, count, coming_tile, coming_first)
        coming_tile, coming_first = _after(coming_tile, coming_first, num_inputs, INPUTS)
        product = weight.to(gl.float32) * x[None, :]
        part = gl.convert_layout(gl.sum(product.reshape([OUTPUTS, RUNS, HELD]), 2), by_run)
        acc += part * scale[None, :] if BLOCK_INPUTS > 0 else part
        tile_now = tile
        tile, first = _after(tile, first, num_inputs, INPUTS)
        if first == 0:
            _finish(out_ptr, scales_ptr, bias_ptr, acc, tile_now, num_outputs, BLOCK_INPUTS)
            acc = zeros


@gluon.jit
def _finish(out_ptr, scales_ptr, bias_ptr, acc, tile, num_outputs, BLOCK_INPUTS: gl.constexpr):
    """Add up what the threads found of a tile, and store it."""
    OUTPUTS: gl.constexpr = acc.type.shape[0]
    total = gl.sum(acc, 1)
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=total.type.layout)
    in_outputs = output < num_outputs
    if BLOCK_INPUTS == 0 and scales_ptr is not None:
        total *= gl.load(scales_ptr + output, in_outputs, 0.0)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + output, in_outputs, 0.0).to(gl.float32)
    gl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), in_outputs)


class Streams(NamedTuple):
    """What a program computes at a time, how many steps are read ahead, and how many programs of a
    multiprocessor go on from tile to tile."""

    outputs: int
    stages: int
    programs: int


def why_not(
    x: Tensor, weight: Tensor, block: tuple[int, int] | None, streams: Streams
) -> str | None:
    """Why the kernel cannot multiply them; None if it can."""
    if len(x) != 1 or not x.is_contiguous():
        return "it takes one token"
    if weight.dtype not in (torch.float8_e4m3fn, torch.float16, torch.bfloat16):
        return f"weights in {weight.dtype}"
    if not weight.is_contiguous() or weight.shape[1] * weight.element_size() % 16:
        return "rows do not begin at multiples of 16 bytes"
    if block is not None and (block[0] % streams.outputs or block[1] % 16):
        return f"tiles of {streams.outputs} outputs cut blocks of {block}"
    return None


def multiply_vector(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    block: tuple[int, int] | None,
    streams: Streams,
) -> None:
    """out = x W^T + bias for x [1, inputs] and W [outputs, inputs], which may have `scales` of its
    rows, or of each `block` as in `ScaledWeights`."""
    num_outputs, num_inputs = weight.shape
    box = [streams.outputs, STEP_BYTES // weight.element_size()]
    swizzled = gl.NVMMASharedLayout(128, 8 * weight.element_size(), 2)
    at_once = streams.programs * multiprocessors(out.device)
    vector_kernel[(min(-(-num_outputs // streams.outputs), at_once),)](
        x,
        TensorDescriptor.from_tensor(weight, box, swizzled),
        scales,
        bias,
        out,
        num_outputs,
        num_inputs,
        0 if block is None or scales is None else scales.stride(0),
        BLOCK_OUTPUTS=0 if block is None else block[0],
        BLOCK_INPUTS=0 if block is None else block[1],
        STAGES=streams.stages,
        num_warps=WARPS,
        **launch_options(out),
    )
