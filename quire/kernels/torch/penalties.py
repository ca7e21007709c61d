"""Repetition, frequency and presence penalties, from counts of the tokens' uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PenaltySettings:
    """One number per row of the row table."""

    slot: Tensor
    """int32; the row's place in the counts, 0 where the row has no penalties."""
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def penalize(logits: Tensor, rows: Tensor, uses: Tensor, settings: PenaltySettings) -> None:
    """Lowers the float32 logits [S, V] of used tokens, in place.

    `uses` int32 [slots, V] holds twice the number of generated uses, plus one if the prompt uses
    the token. Where there is any use, positive logits are divided by the repetition penalty, others
    multiplied. Then the frequency penalty is subtracted once per generated use, and the presence
    penalty once if there is any.
    """
    slots = settings.slot[rows].long()
    for line in slots.nonzero()[:, 0].tolist():
        row, used, part = rows[line], uses[slots[line]], logits[line]
        repetition = float(settings.repetition[row])
        frequency, presence = float(settings.frequency[row]), float(settings.presence[row])
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        counts = (used >> 1).float()
        part.copy_(torch.where(used != 0, repeated, part))
        part -= counts * frequency
        part -= counts.clamp_max(1) * presence


def count_uses(uses: Tensor, rows: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Counts generated `tokens[i]` for `rows[i]`; `slots` is as in `PenaltySettings`.

    Rows without a slot count in slot 0, which is not read.
    """
    flat = slots[rows].long() * uses.shape[1] + tokens
    uses.view(-1).index_add_(0, flat, torch.full_like(flat, 2, dtype=torch.int32))
