"""Masks of grammars applied to float32 scores in place (see src/bitmask.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import native, num_threads


def apply_bitmask(scores: Tensor, lines: Tensor, bits: Tensor) -> None:
    """As `quire.kernels.torch.bitmask.apply_bitmask`."""
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    assert lines.dtype == bits.dtype == torch.int32
    assert lines.is_contiguous() and bits.is_contiguous()
    native().quire_apply_bitmask(
        scores.data_ptr(),
        scores.stride(0),
        scores.shape[1],
        lines.data_ptr(),
        bits.data_ptr(),
        len(lines),
        bits.shape[1],
        num_threads(),
    )
