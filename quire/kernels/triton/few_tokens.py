"""Linear layers of a few tokens, as steps have that verify drafts of one row.

The weight is read once, at memory speed, and multiplied on tensor cores with all tokens, padded to
the narrowest product. Launches overlap, which those of cuBLAS do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs

MOST_TOKENS = 16
"""The width of the product."""
EXACT = tl.constexpr("ieee")


class Tile(NamedTuple):
    """What a program works on at a time, and with how many warps."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


USED_UP_TO = 0
"""Tokens of a step whose layers are computed here; 0, as no GPU has compared it with cuBLAS yet:
none. `benchmarks/gpu_speculation.py --layers` does."""
TILE = Tile(32, 256, 4, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _few_tokens_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    stride_x,
    stride_weight,
    stride_out,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, INPUTS)
    in_outputs, in_tokens = output < num_outputs, token < num_tokens
    weights = weight_ptr + output.to(tl.int64)[:, None] * stride_weight
    inputs = x_ptr + token[None, :] * stride_x
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    wait_for_inputs(OVERLAPS)
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        at = start + column
        known = at < num_inputs
        weight = tl.load(weights + at[None, :], in_outputs[:, None] & known[None, :], 0.0)
        x = tl.load(inputs + at[:, None], known[:, None] & in_tokens[None, :], 0.0)
        acc = tl.dot(weight, x, acc, input_precision=EXACT)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, in_outputs, 0.0).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * stride_out + output[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), in_outputs[:, None] & in_tokens[None, :])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """x W^T + bias for x [tokens, inputs], up to `MOST_TOKENS` of them, and W [outputs, inputs]."""
    num_tokens, num_outputs = len(x), len(weight)
    assert num_tokens <= MOST_TOKENS and x.stride(1) == weight.stride(1) == 1
    if out is None:
        out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    _few_tokens_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x,
        weight,
        bias,
        out,
        num_tokens,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        TOKENS=MOST_TOKENS,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(out),
    )
    return out
