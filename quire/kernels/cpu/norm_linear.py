"""A linear layer with the norm before it and the gates after it, in one call of the library."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from quire.kernels.cpu.library import LayerCall, NativeMatrix, native, num_threads


def norm_linear(
    matrix: ctypes._Pointer[NativeMatrix],
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) W^T + bias, x + residual), with silu(gate) * up of the first if `gated`;
    the residual is overwritten. `matrix` names a weight in any format that the library packs."""
    weight = matrix.contents
    num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
    num_tokens, x_stride = x.shape[0], require_rows("x", x, num_inputs)
    residual_address = bias_address = None
    if residual is not None:
        if require_rows("residual", residual, num_inputs) != num_inputs or len(residual) != len(x):
            raise ValueError(f"residual must be contiguous, with {len(x)} rows")
        residual_address = residual.data_ptr()
    if bias is not None:
        bias_address = bias.data_ptr()
    width = num_outputs // 2 if gated else num_outputs
    out = torch.empty(num_tokens, width)
    call = LayerCall(
        x.data_ptr(),
        x_stride,
        num_tokens,
        norm_weight.data_ptr(),
        eps,
        residual_address,
        bias_address,
        gated,
        out.data_ptr(),
        width,
        num_threads(),
    )
    if entry()(matrix, call) != 0:
        raise MemoryError("no memory for the working space of a linear layer")
    return out, x if residual is None else residual


@cache
def entry() -> ctypes._NamedFuncPointer:
    """The library's function; to look it up takes longer than to call it."""
    return native().quire_norm_linear


def require_rows(name: str, x: Tensor, width: int) -> int:
    """Elements from one row to the next; refuses what the library would read or write wrongly."""
    if x.dim() == 2 and x.dtype == torch.float32 and x.is_cpu and x.shape[1] == width:
        stride, inner_stride = x.stride()
        if inner_stride == 1 or width == 1 or not len(x):
            return stride
    raise ValueError(
        f"{name} must be float32 [tokens, {width}] on the CPU, contiguous in its rows; "
        f"got {x.dtype} {list(x.shape)} on {x.device} with strides {x.stride()}"
    )
