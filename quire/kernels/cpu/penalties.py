"""Penalties for used tokens, on float32 logits in place (see src/penalties.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import native, require_column
from quire.kernels.cpu.norm_linear import require_rows
from quire.kernels.torch.penalties import PenaltySettings


def penalize(logits: Tensor, rows: Tensor, uses: Tensor, settings: PenaltySettings) -> None:
    """As the reference, bit for bit."""
    num_lines, vocab_size = logits.shape
    stride = require_rows("logits", logits, vocab_size)
    require_column("rows", rows, torch.int64, num_lines)
    require_column("slot", settings.slot, torch.int32, len(settings.slot))
    require_column("uses", uses.view(-1), torch.int32, len(uses) * vocab_size)
    for name in ("repetition", "frequency", "presence"):
        require_column(name, getattr(settings, name), torch.float32, len(settings.slot))
    native().quire_penalize(
        logits.data_ptr(),
        stride,
        vocab_size,
        rows.data_ptr(),
        num_lines,
        uses.data_ptr(),
        settings.slot.data_ptr(),
        settings.repetition.data_ptr(),
        settings.frequency.data_ptr(),
        settings.presence.data_ptr(),
    )
