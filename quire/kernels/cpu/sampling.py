"""Greedy choice, in the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import native, num_threads
from quire.kernels.cpu.norm_linear import require_rows


def largest(scores: Tensor) -> Tensor:
    """The place of the largest number in each line of float32 [S, V], as `argmax` has it: the first
    of equals, and NaN above all. int32 [S]."""
    num_lines, width = scores.shape
    stride = require_rows("scores", scores, width)
    out = torch.empty(num_lines, dtype=torch.int32)
    native().quire_largest(
        scores.data_ptr(), stride, num_lines, width, out.data_ptr(), num_threads()
    )
    return out
