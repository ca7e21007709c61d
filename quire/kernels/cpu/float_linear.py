"""Linear layers in float32 with a weight that is packed once at load (see src/float_linear.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.cpu.library import FloatLinearCall, NativeMatrix, native, num_threads
from quire.kernels.cpu.memory import Empty

GROUP = 16
"""Outputs that lie together, as in src/float_linear.h."""
FLOAT_KIND = -1
"""Takes the place of a format of blocks."""


def pack_weight(*parts: Tensor, empty: Empty = torch.empty) -> Tensor:
    """[groups, inputs, GROUP] in float32 from parts [outputs, inputs] one below the other.

    Missing outputs of the last group are 0. Nothing is copied on the way, for parts may be large.
    """
    total, num_inputs = sum(len(part) for part in parts), parts[0].shape[1]
    packed = empty((-(-total // GROUP), num_inputs, GROUP), dtype=torch.float32)
    by_output = packed.transpose(1, 2)
    if total % GROUP:
        packed[-1] = 0.0
    at = 0
    for part in parts:
        while len(part):
            group, first = divmod(at, GROUP)
            full = len(part) // GROUP
            if first == 0 and full:
                count = full * GROUP
                by_output[group : group + full] = part[:count].view(full, GROUP, num_inputs)
            else:
                count = min(GROUP - first, len(part))
                by_output[group, first : first + count] = part[:count]
            at, part = at + count, part[count:]
    return packed


def handle(packed: Tensor, num_outputs: int) -> ctypes._Pointer[NativeMatrix]:
    """What `norm_linear` takes. It holds an address: the packed weight must outlive it."""
    matrix = NativeMatrix(packed.data_ptr(), FLOAT_KIND, num_outputs, packed.shape[1], 1)
    return ctypes.pointer(matrix)


def packed_linear(
    x: Tensor,
    packed: Tensor,
    num_outputs: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + bias for x [tokens, inputs] in float32 and a packed W, into `out` if given."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_inputs = packed.shape[1]
    assert x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == num_inputs
    if out is None:
        out = torch.empty((x.shape[0], num_outputs), dtype=torch.float32)
    assert out.dtype == torch.float32 and out.shape == (x.shape[0], num_outputs)
    assert out.stride(1) == 1 or num_outputs == 1
    call = FloatLinearCall(
        x=x.data_ptr(),
        weight=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        num_tokens=x.shape[0],
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        num_threads=num_threads(),
    )
    if native().quire_float_linear(ctypes.byref(call)) != 0:
        raise MemoryError("no memory for the working space of a linear layer")
    return out
