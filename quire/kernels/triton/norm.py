"""RMSNorm with the residual addition fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    stride_x,
    dim,
    HAS_RESIDUAL: tl.constexpr,
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
    normal = (wide * scale).to(x.dtype)
    tl.store(out_ptr + row * dim + columns, (normal * weight).to(x.dtype), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """norm(x) * weight over the last dimension of x [rows, dim].

    With `residual` it is norm(x + residual), and the sum replaces the residual in place.
    """
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(dim)
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
        **launch_options(out),
    )
    return out
