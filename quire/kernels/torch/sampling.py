"""Sampling of one token per line of logits: the highest, or drawn with temperature and filters.

A line's row of the row table says how it samples. top_k, top_p and min_p are a cutoff: tokens whose
logit is at least that are kept. So tokens of equal logit stay or go together, and the kept set does
not depend on how the logits were ordered.

- min_p keeps tokens at least `min_p` times as likely as the likeliest;
- top_k keeps tokens whose logit is at least the k-th highest;
- top_p keeps, of what those two left, each token for which the tokens of higher logit hold less
  than `top_p` of the mass left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.torch.noise import draw_keys, gumbel, hash_tokens

# Bounds the temporaries of a batch; the result does not depend on it.
MAX_ELEMENTS = 1 << 22
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each row samples: one number per row of the row table."""

    temperature: Tensor
    """0 takes the highest logit, and then nothing below is looked at."""
    seed_low: Tensor
    """int32, as is `seed_high`."""
    seed_high: Tensor
    top_k: Tensor
    """int32; 0 where off."""
    top_p: Tensor
    """1 where off."""
    log_min_p: Tensor
    """-inf where off."""
    scratch: Tensor
    """`merge_scratch`, for as many lines as are ever sampled at once."""


def merge_scratch(max_lines: int, device: torch.device) -> Tensor:
    """Where a GPU kernel merges the parts of a line; each call leaves it as it found it."""
    scratch = torch.zeros((2, max_lines), dtype=torch.int64, device=device)
    scratch[0] = -torch.iinfo(torch.int64).max
    return scratch


@dataclass(frozen=True)
class Kinds:
    """What the lines of a batch do. Where False, none does; a kernel may then skip the work."""

    draws: bool
    """Some line has a temperature."""
    filters: bool
    """Some line has top_k, top_p or min_p."""
    searches: bool
    """Some line has top_k or top_p: its cutoff does not follow from the highest logit alone."""


def sample_tokens(logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings) -> Tensor:
    """One token for each line of `logits` [S, V]; int32 [S].

    `rows` int64 [S] are the lines' rows; `positions` int32 holds, for each row of the table, the
    position of the token to sample. Among equals the lowest token id wins.
    """
    tokens = logits.argmax(-1)
    drawn = (settings.temperature[rows] > 0).nonzero()[:, 0]
    for lines in drawn.split(max(1, MAX_ELEMENTS // logits.shape[1])):
        if len(lines):
            tokens[lines] = _draw(logits[lines], rows[lines], positions, settings)
    return tokens.int()


def _draw(logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings) -> Tensor:
    """Of lines that all have a temperature: the highest of tempered logits and Gumbel noise, which
    is a draw from the softmax of what the filters keep."""
    tempered = logits.float() / settings.temperature[rows][:, None]
    cutoff = token_cutoffs(logits, rows, settings)[:, None]
    kept = tempered.masked_fill(tempered < cutoff, -math.inf)
    keys = draw_keys(settings.seed_low[rows], settings.seed_high[rows], positions[rows])
    return (kept + gumbel(hash_tokens(logits.shape[1], logits.device), *keys)).argmax(-1)


def token_cutoffs(logits: Tensor, rows: Tensor, settings: RowSettings) -> Tensor:
    """Lowest logit kept in each line, once divided by the temperature; float32 [S].

    Minus infinity where nothing is filtered, or nothing could be kept.
    """
    temperature, top_k = settings.temperature[rows], settings.top_k[rows]
    top_p, log_min_p = settings.top_p[rows], settings.log_min_p[rows]
    ordered = (logits.float() / temperature[:, None]).sort(-1, descending=True).values
    found = cutoffs(ordered, top_k, top_p, log_min_p)
    filters = (top_k > 0) | (top_p < 1.0) | (log_min_p > -math.inf)
    return found.masked_fill(~filters | (temperature == 0), -math.inf)


def cutoffs(ordered: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Lowest logit kept [S] of logits in falling order [S, V]; the filters are [S] each."""
    best = ordered[:, :1]
    kth = ordered.gather(1, top_k[:, None].long().clamp(1, ordered.shape[1]) - 1)
    floor = kth.masked_fill(top_k[:, None] == 0, LOWEST).clamp_min(LOWEST)
    floor = torch.maximum(floor, best + log_min_p[:, None])
    masses = (ordered - best.clamp_min(LOWEST)).exp().masked_fill(ordered < floor, 0.0)
    # Doubles, so that the order of summation, which may vary with the batch, moves no cutoff.
    up_to = masses.cumsum(-1, dtype=torch.float64)
    share = (top_p[:, None] * up_to[:, -1:]).masked_fill(top_p[:, None] >= 1.0, math.inf)
    kept = ((up_to - masses < share) & (ordered >= floor)).sum(-1, keepdim=True)
    return ordered.gather(1, kept.clamp_min(1) - 1)[:, 0]
