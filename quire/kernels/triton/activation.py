"""SiLU of the gate times the up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, inner, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    # One axis for both: all but the first end at 65,535, and a step may have more rows.
    chunks = tl.cdiv(inner, WIDTH)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    columns = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mask = columns < inner
    wait_for_inputs(OVERLAPS)
    gate = tl.load(x_ptr + row * 2 * inner + columns, mask, 0.0)
    up = tl.load(x_ptr + row * 2 * inner + inner + columns, mask, 0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * inner + columns, activated * up, mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side in [rows, 2 * inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(inner))
    _silu_and_mul_kernel[(rows * triton.cdiv(inner, width),)](
        gate_up, out, inner, WIDTH=width, num_warps=4, **launch_options(out)
    )
    return out
