"""Drafts from a text itself: what followed when its last tokens occurred before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNBOUNDED = 1 << 20


@dataclass(frozen=True)
class NgramSettings:
    num_drafts: int
    least: int
    """Tokens at the end of a text that must have occurred before."""
    most: int
    """Tokens that are compared: places that agree in more of them are better."""
    beyond: int = UNBOUNDED
    """There are at most so many more drafts than tokens that agree: a short agreement may be
    chance."""


def propose_ngrams(
    token_ids: Tensor, num_tokens: Tensor, rows: Tensor, settings: NgramSettings
) -> Tensor:
    """Drafts for each of `rows` [R] of `token_ids` [rows, tokens], of which `num_tokens` are known:
    int32 [R, num_drafts], -1 where nothing agrees and behind as many as there may be.

    They are the tokens behind the place whose tokens agree with the last ones of the row in most
    tokens, the latest of these. At the end of the text they go on with the drafts themselves, so
    that what repeats is drafted to the full.
    """
    drafts = torch.full((len(rows), settings.num_drafts), -1, dtype=torch.int32)
    for i, row in enumerate(rows.tolist()):
        known = token_ids[row, : int(num_tokens[row])].cpu()
        place, length = _best_place(known, settings)
        period = len(known) - place
        if period:
            column = torch.arange(min(settings.num_drafts, length + settings.beyond))
            drafts[i, : len(column)] = known[place + column % period]
    return drafts.to(token_ids.device)


def _best_place(known: Tensor, settings: NgramSettings) -> tuple[int, int]:
    """With the tokens that agree; the end of the text where nothing does."""
    end = len(known)
    best, length = end, settings.least - 1
    for place in range(settings.least, end):
        common = 0
        while common < min(settings.most, place) and (
            known[place - 1 - common] == known[end - 1 - common]
        ):
            common += 1
        if common >= max(length, settings.least):
            best, length = place, common
    return best, length
