"""The reference of the kernel that applies masks of grammars to logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Sets logits[lines[i], t] to minus infinity where bit t % 32 of bits[i, t // 32] is 0.

    `lines` are integers [n], `bits` int32 [n, words]; tokens beyond the words are forbidden.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    forbidden = torch.ones(len(lines), logits.shape[1], dtype=torch.bool, device=logits.device)
    forbidden[:, : allowed.shape[1]] = ~allowed
    logits[lines.long()] = logits[lines.long()].masked_fill(forbidden, -math.inf)
