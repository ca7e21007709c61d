"""Matrix times vector, the linear layers of a single token: reads the weight at memory speed.

Each program computes two outputs over the whole input. cuBLAS needs 10 to 30 % longer on layers of
an 8B model, and up to four times as long on small ones (docs/performance.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 2
"""Outputs of one program."""


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    stride_weight,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    in_rows = rows < num_outputs
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None] * stride_weight
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        at = start + columns
        in_columns = at < num_inputs
        x = tl.load(x_ptr + at, in_columns, 0.0).to(tl.float32)
        weight = tl.load(weight_rows + at[None, :], in_rows[:, None] & in_columns[None, :], 0.0)
        acc += weight.to(tl.float32) * x[None, :]
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, in_rows, 0.0).to(tl.float32)
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), in_rows)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x W^T + bias for x [1, inputs] and W [outputs, inputs]."""
    num_outputs, num_inputs = weight.shape
    if out is None:
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    small = num_inputs <= 1024
    _gemv_kernel[(triton.cdiv(num_outputs, OUTPUTS),)](
        x,
        weight,
        bias if bias is not None else x,
        out,
        num_outputs,
        num_inputs,
        weight.stride(0),
        HAS_BIAS=bias is not None,
        OUTPUTS=OUTPUTS,
        INPUTS=512 if small else 2048,
        num_warps=2 if small else 8,
        num_stages=4 if small else 2,
    )
    return out
