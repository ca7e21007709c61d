"""Masks of grammars applied to float32 logits in place (see src/bitmask.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import native, num_threads


def apply_bitmask(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """As `quire.kernels.torch.bitmask.apply_bitmask`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert lines.dtype == bits.dtype == torch.int32
    assert lines.is_contiguous() and bits.is_contiguous()
    native().quire_apply_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        lines.data_ptr(),
        bits.data_ptr(),
        len(lines),
        bits.shape[1],
        num_threads(),
    )
