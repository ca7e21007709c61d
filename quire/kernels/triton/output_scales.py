"""Scales of a product's tokens and outputs, where cuBLAS is quicker without them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs


@triton.jit
def _scale_kernel(
    out_ptr,
    token_scales_ptr,
    output_scales_ptr,
    bias_ptr,
    factor,
    num_outputs,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    chunks = tl.cdiv(num_outputs, WIDTH)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    outputs = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mask = outputs < num_outputs
    scales = tl.load(output_scales_ptr + outputs, mask, 0.0) * factor
    wait_for_inputs(OVERLAPS)
    place = out_ptr + token * num_outputs + outputs
    out = tl.load(place, mask, 0.0).to(tl.float32) * (tl.load(token_scales_ptr + token) * scales)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask, 0.0).to(tl.float32)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask)


def scale_outputs(
    out: Tensor, token_scales: Tensor, output_scales: Tensor, factor: float, bias: Tensor | None
) -> None:
    """Multiplies out [tokens, outputs] with scales of both and a factor, and adds the bias."""
    tokens, num_outputs = out.shape
    width = min(1024, triton.next_power_of_2(num_outputs))
    _scale_kernel[(tokens * triton.cdiv(num_outputs, width),)](
        out,
        token_scales,
        output_scales,
        bias,
        factor,
        num_outputs,
        WIDTH=width,
        num_warps=4,
        **launch_options(out),
    )
