"""SiLU of the gate times the up projection, and the rounding of a layer that reads the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.torch.quantized_weights import InputRounding
from quire.kernels.triton.rounding import (
    RoundedInput,
    empty_rounded,
    rounding_options,
    store_rounded,
)


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    inner,
    scales_ptr,
    stride_scales,
    fixed_ptr,
    zero_ptr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # One axis for both: all but the first end at 65,535, and a step may have more rows.
    chunks = tl.cdiv(inner, WIDTH)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    columns = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mask = columns < inner
    wait_for_inputs(OVERLAPS)
    gate = tl.load(x_ptr + row * 2 * inner + columns, mask, 0.0)
    up = tl.load(x_ptr + row * 2 * inner + inner + columns, mask, 0.0)
    wide = gate.to(tl.float32)
    out = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
    if scales_ptr is None:
        tl.store(out_ptr + row * inner + columns, out, mask)
    else:
        store_rounded(
            out,
            row,
            columns,
            inner,
            out_ptr,
            scales_ptr,
            stride_scales,
            fixed_ptr,
            zero_ptr,
            GROUP,
            LARGEST,
            WIDTH,
        )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side in [rows, 2 * inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(inner))
    _silu_and_mul_kernel[(rows * triton.cdiv(inner, width),)](
        gate_up,
        out,
        inner,
        WIDTH=width,
        num_warps=4,
        **rounding_options(None, None, width),
        **launch_options(out),
    )
    return out


def rounded_silu_and_mul(gate_up: Tensor, rounding: InputRounding) -> RoundedInput:
    """`silu_and_mul` as a layer with this rounding takes it."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rounded(rounding, rows, inner, gate_up)
    # A program needs all inputs that share a scale.
    width = triton.next_power_of_2(inner)
    if rounding.group_size is not None:
        width = max(min(1024, width), rounding.group_size)
    _silu_and_mul_kernel[(rows * triton.cdiv(inner, width),)](
        gate_up,
        out.values,
        inner,
        WIDTH=width,
        num_warps=min(max(width // 512, 4), 16),
        **rounding_options(out.scales, rounding, width),
        **launch_options(gate_up),
    )
    return out
