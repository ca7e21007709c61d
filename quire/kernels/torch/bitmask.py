"""The twin of the kernel that applies masks of grammars to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_bitmask(scores: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Sets scores[lines[i], t] to minus infinity where bit t % 32 of bits[i, t // 32] is 0.

    `lines` are integers [n], `bits` int32 [n, words]; tokens beyond the words are forbidden.
    """
    vocab_size = scores.shape[1]
    covered = min(32 * bits.shape[1], vocab_size)
    allowed = _expand(bits)[:, :covered]
    if len(lines) == len(scores):  # all of them, in order
        scores[:, :covered].masked_fill_(~allowed, -math.inf)
        scores[:, covered:] = -math.inf
        return
    part = scores.index_select(0, lines)
    part[:, :covered].masked_fill_(~allowed, -math.inf)
    part[:, covered:] = -math.inf
    scores.index_copy_(0, lines.long(), part)


def _expand(bits: Tensor) -> Tensor:
    """[n, words] -> bool [n, 32 * words]."""
    every = torch.arange(256, dtype=torch.uint8, device=bits.device)[:, None]
    by_byte = (every >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return by_byte.bool()[bits.view(torch.uint8).long()].flatten(1)
