"""The end of a product that was computed in parts, or without its scales."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs


@triton.jit
def _finish_product_kernel(
    parts_ptr,
    token_scales_ptr,
    output_scales_ptr,
    bias_ptr,
    out_ptr,
    factor,
    num_outputs,
    stride_part,
    stride_out,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    chunks = tl.cdiv(num_outputs, WIDTH)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    outputs = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mask = outputs < num_outputs
    wait_for_inputs(OVERLAPS)
    place = parts_ptr + token * num_outputs + outputs
    total = tl.load(place, mask, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(place + part * stride_part, mask, 0.0)
    total = total.to(tl.float32) * factor
    if token_scales_ptr is not None:
        total *= tl.load(token_scales_ptr + token)
    if output_scales_ptr is not None:
        total *= tl.load(output_scales_ptr + outputs, mask, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + outputs, total.to(out_ptr.dtype.element_ty), mask)


def finish_product(
    parts: Tensor,
    token_scales: Tensor | None,
    output_scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    factor: float = 1.0,
) -> None:
    """out [tokens, outputs] = the sum of parts [parts, tokens, outputs], scaled, plus the bias.
    They may lie in the same place if there is one part."""
    num_parts, num_tokens, num_outputs = parts.shape
    width = min(1024, triton.next_power_of_2(num_outputs))
    _finish_product_kernel[(num_tokens * triton.cdiv(num_outputs, width),)](
        parts,
        token_scales,
        output_scales,
        bias,
        out,
        factor,
        num_outputs,
        parts.stride(0),
        out.stride(0),
        PARTS=num_parts,
        WIDTH=width,
        num_warps=4,
        **launch_options(out),
    )
