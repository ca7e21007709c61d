"""top_k, top_p and min_p: which tokens may be drawn at all.

Each filter is a cutoff: tokens that score at least that are kept. So tokens of equal score stay or
go together, and the kept set does not depend on how the scores were ordered.

- min_p keeps tokens at least `min_p` times as likely as the likeliest;
- top_k keeps tokens that score at least the k-th highest score;
- top_p keeps, of what those two left, each token for which the tokens of higher score hold less
  than `top_p` of the mass left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.decoding.random import Draw
from quire.decoding.rows import Lines, RowColumns, RowSet
from quire.protocol.plan import AddedRow

# On a CPU a full sort costs 20 times as much as finding this many highest scores, which nearly
# always reach the cutoff; lines where they do not go on to the next number, at last to the sort.
CANDIDATES = (128, 1024)
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Limits:
    """The filters of some lines, each [S, 1]."""

    top_k: Tensor
    """int64; 0 where off."""
    top_p: Tensor
    log_min_p: Tensor
    total: Tensor | None = None
    """Mass left by min_p in the whole vocabulary, relative to the likeliest token."""

    def lines(self, index: Tensor) -> Limits:
        total = None if self.total is None else self.total[index]
        return Limits(self.top_k[index], self.top_p[index], self.log_min_p[index], total)


def _masses(scores: Tensor, best: Tensor, floor: Tensor) -> Tensor:
    """exp(scores - best) where scores reach `floor`, else 0."""
    return (scores - best.clamp_min(LOWEST)).exp_().masked_fill_(scores < floor, 0.0)


def _total_mass(scores: Tensor) -> Tensor:
    """Mass of all tokens relative to the likeliest one, whose probability is 1 over this [S, 1]."""
    return scores.softmax(-1).amax(-1, keepdim=True).double().reciprocal_()


def cutoffs(ordered: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Lowest score kept [S, 1] given the highest scores in falling order [S, C].

    Also whether C scores were enough to tell and hold all that is kept [S]; for C = V they are,
    whatever this says. Lines without any allowed token count as not enough.
    """
    best, last = ordered[:, :1], ordered[:, -1:]
    limited = limits.top_k > 0
    kth = ordered.gather(1, limits.top_k.clamp(1, ordered.shape[1]) - 1)
    floor = kth.masked_fill(~limited, LOWEST).clamp_min(LOWEST)
    floor = torch.maximum(floor, best + limits.log_min_p)
    masses = _masses(ordered, best, floor)
    # Doubles, so that the order of summation, which may vary with the batch, moves no cutoff.
    up_to = masses.cumsum(-1, dtype=torch.float64)
    left = up_to[:, -1:]
    if limits.total is not None:
        left = torch.where(limited, left, limits.total)
    share = (limits.top_p * left).masked_fill(limits.top_p >= 1.0, math.inf)
    kept = ((up_to - masses < share) & (ordered >= floor)).sum(-1, keepdim=True)
    cutoff = ordered.gather(1, kept.clamp_min(1) - 1)
    enough = (last < torch.where(limited, floor, cutoff)) & (best >= LOWEST)
    return cutoff, enough[:, 0]


class Filters:
    """Each row's top_k, top_p and min_p, and the draw from what they keep."""

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self.users = RowSet(columns.max_rows)
        self._vocab_size = vocab_size
        self._top_k = columns.integers()
        self._top_p = columns.floats()
        self._log_min_p = columns.floats()

    def add(self, added: AddedRow) -> None:
        params = added.params
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        if top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
            return
        self.users.add(added.row)
        self._top_k.host[added.row] = top_k
        self._top_p.host[added.row] = params.top_p
        self._log_min_p.host[added.row] = math.log(params.min_p) if params.min_p else -math.inf

    def remove(self, row: int) -> None:
        self.users.discard(row)

    def choose(self, scores: Tensor, lines: Lines, draw: Draw) -> Tensor:
        """Draw a token for each of `lines` from its filtered scores [S, V], which are consumed."""
        limits = Limits(
            self._top_k.device[lines.rows][:, None].long(),
            self._top_p.device[lines.rows][:, None],
            self._log_min_p.device[lines.rows][:, None],
        )
        if scores.device.type != "cpu":
            return _choose_sorted(scores, limits, draw)
        top_k, top_p, log_min_p = (
            column.host[lines.host_rows] for column in (self._top_k, self._top_p, self._log_min_p)
        )
        by_mass = (top_k == 0) & (top_p < 1.0)
        if bool((by_mass & (log_min_p > -math.inf)).any()):
            floor = scores.amax(-1, keepdim=True) + limits.log_min_p
            scores.masked_fill_(scores < floor, -math.inf)
        if bool(by_mass.any()):
            limits = replace(limits, total=_total_mass(scores))
        usable = [n for n in CANDIDATES if int(top_k.min()) < n <= self._vocab_size // 4]
        return _choose_narrowed(scores, limits, draw, usable)


def _choose_sorted(scores: Tensor, limits: Limits, draw: Draw) -> Tensor:
    """The way without a look at the data: sort everything."""
    ordered = scores.sort(-1, descending=True).values
    cutoff, _ = cutoffs(ordered, replace(limits, total=None))
    return draw.from_all(scores.masked_fill_(scores < cutoff, -math.inf))


def _choose_narrowed(scores: Tensor, limits: Limits, draw: Draw, widths: list[int]) -> Tensor:
    """Sort only the highest `widths[0]` scores; lines for which these are too few try again."""
    if not widths:
        return _choose_sorted(scores, limits, draw)
    ordered, token_ids = scores.topk(widths[0])
    cutoff, enough = cutoffs(ordered, limits)
    tokens = draw.from_candidates(ordered.masked_fill_(ordered < cutoff, -math.inf), token_ids)
    rest = (~enough).nonzero()[:, 0]
    if len(rest):
        again = (scores[rest], limits.lines(rest), draw.lines(rest))
        tokens[rest] = _choose_narrowed(*again, widths[1:])
    return tokens
