"""RMSNorm with the residual addition fused in, and the rounding of the layer that reads it."""

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
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    stride_x,
    dim,
    scales_ptr,
    stride_scales,
    fixed_ptr,
    zero_ptr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < dim
    weight = tl.load(weight_ptr + columns, mask, 0.0)
    wait_for_inputs(OVERLAPS)
    x = tl.load(x_ptr + row * stride_x + columns, mask, 0.0)
    if HAS_RESIDUAL:
        # The sum is rounded to the model's type, as it is kept, before it is normalised.
        place = residual_ptr + row * dim + columns
        x = (x.to(tl.float32) + tl.load(place, mask, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(place, x, mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps)
    if weight.dtype == tl.float32:
        out = (wide * scale * weight).to(x.dtype)
    else:
        out = ((wide * scale).to(x.dtype) * weight).to(x.dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * dim + columns, out, mask)
    else:
        store_rounded(
            out,
            row,
            columns,
            dim,
            out_ptr,
            scales_ptr,
            stride_scales,
            fixed_ptr,
            zero_ptr,
            GROUP,
            LARGEST,
            WIDTH,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """norm(x) * weight over the last dimension of x [rows, dim].

    With `residual` it is norm(x + residual), and the sum replaces the residual in place.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, residual, out, None)
    return out


def rounded_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, rounding: InputRounding
) -> RoundedInput:
    """`rms_norm` as a layer with this rounding takes it."""
    out = empty_rounded(rounding, *x.shape, x)
    _launch(x, weight, eps, residual, out.values, out.scales, rounding)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    rounding: InputRounding | None = None,
) -> None:
    rows, dim = x.shape
    width = triton.next_power_of_2(dim)
    if rounding is not None:
        width = max(width, rounding.group_size or 1)
    _rms_norm_kernel[(rows,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        eps,
        x.stride(0),
        dim,
        HAS_RESIDUAL=residual is not None,
        WIDTH=width,
        num_warps=min(max(width // 512, 1), 16),
        **rounding_options(scales, rounding, width),
        **launch_options(out),
    )
