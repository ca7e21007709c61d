"""Sampling, in the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import SamplingCall, native, num_threads, require_column
from quire.kernels.cpu.norm_linear import require_rows
from quire.kernels.torch.sampling import RowSettings


def largest(logits: Tensor) -> Tensor:
    """The place of the largest number in each line of float32 [S, V], as `argmax` has it: the first
    of equals, and NaN above all. int32 [S]."""
    num_lines, width = logits.shape
    stride = require_rows("logits", logits, width)
    out = torch.empty(num_lines, dtype=torch.int32)
    native().quire_largest(
        logits.data_ptr(), stride, num_lines, width, out.data_ptr(), num_threads()
    )
    return out


def sample_tokens(logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings) -> Tensor:
    """One token for each line of float32 logits [S, V]; see the reference. int32 [S]."""
    num_lines, width = logits.shape
    stride = require_rows("logits", logits, width)
    require_column("rows", rows, torch.int64, num_lines)
    require_column("positions", positions, torch.int32, len(positions))
    for name in ("seed_low", "seed_high", "top_k"):
        require_column(name, getattr(settings, name), torch.int32, len(positions))
    for name in ("temperature", "top_p", "log_min_p"):
        require_column(name, getattr(settings, name), torch.float32, len(positions))
    out = torch.empty(num_lines, dtype=torch.int32)
    call = SamplingCall(
        logits=logits.data_ptr(),
        stride=stride,
        num_lines=num_lines,
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        positions=positions.data_ptr(),
        temperature=settings.temperature.data_ptr(),
        seed_low=settings.seed_low.data_ptr(),
        seed_high=settings.seed_high.data_ptr(),
        top_k=settings.top_k.data_ptr(),
        top_p=settings.top_p.data_ptr(),
        log_min_p=settings.log_min_p.data_ptr(),
        width=width,
        num_threads=num_threads(),
    )
    if native().quire_sample(call) != 0:
        raise MemoryError("no memory for the working space of drawing tokens")
    return out
