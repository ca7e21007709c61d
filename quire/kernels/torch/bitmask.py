"""The reference of the kernel that applies masks of grammars to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_bitmask(scores: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Sets scores[lines[i], t] to minus infinity where bit t % 32 of bits[i, t // 32] is 0.

    `lines` are integers [n], `bits` int32 [n, words]; tokens beyond the words are forbidden.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : scores.shape[1]]
    forbidden = torch.ones(len(lines), scores.shape[1], dtype=torch.bool, device=scores.device)
    forbidden[:, : allowed.shape[1]] = ~allowed
    scores[lines.long()] = scores[lines.long()].masked_fill(forbidden, -math.inf)
