"""Choice of one token per line of scores: the highest, or drawn with temperature and filters.

A line's row of the request table says how it chooses. top_k, top_p and min_p are a cutoff: tokens
that score at least that are kept. So tokens of equal score stay or go together, and the kept set
does not depend on how the scores were ordered.

- min_p keeps tokens at least `min_p` times as likely as the likeliest;
- top_k keeps tokens that score at least the k-th highest score;
- top_p keeps, of what those two left, each token for which the tokens of higher score hold less
  than `top_p` of the mass left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.torch.noise import draw_keys, gumbel, hash_tokens

# Elements of scores drawn from at once. Unfiltered draws on a CPU make about twenty passes over
# them, which should stay in its cache; otherwise this bounds memory.
MAX_ELEMENTS = 1 << 22
MAX_ELEMENTS_IN_CACHE = 1 << 18
# On a CPU a full sort costs 20 times as much as finding this many highest scores, which nearly
# always reach the cutoff; lines where they do not go on to the next number, at last to the sort.
CANDIDATES = (128, 1024)
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each row chooses: one number per row of the request table."""

    temperature: Tensor
    """0 takes the highest score, and then nothing below is looked at."""
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
    """`merge_scratch`, for as many lines as are ever chosen for at once."""


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
    """Some line has top_k or top_p: its cutoff does not follow from the highest score alone."""


@dataclass(frozen=True)
class Limits:
    """The filters of some lines, each [S, 1]."""

    top_k: Tensor
    """int64; 0 where off."""
    top_p: Tensor
    log_min_p: Tensor
    total: Tensor | None = None
    """Mass left by min_p in the whole vocabulary, relative to the likeliest token."""

    @property
    def active(self) -> Tensor:
        """Which lines are filtered at all [S]."""
        return ((self.top_k > 0) | (self.top_p < 1.0) | (self.log_min_p > -math.inf))[:, 0]

    def lines(self, index: Tensor) -> Limits:
        total = None if self.total is None else self.total[index]
        return Limits(self.top_k[index], self.top_p[index], self.log_min_p[index], total)


class Draw:
    """Random choice for some lines, one token each."""

    def __init__(self, hashed_tokens: Tensor, key0: Tensor, key1: Tensor) -> None:
        self._hashed_tokens = hashed_tokens
        self._key0 = key0
        self._key1 = key1

    def lines(self, index: Tensor) -> Draw:
        """The same choice for fewer lines."""
        return Draw(self._hashed_tokens, self._key0[index], self._key1[index])

    def from_all(self, scores: Tensor) -> Tensor:
        """Draw from softmax(scores [S, V]); int64 [S]."""
        return gumbel(self._hashed_tokens, self._key0, self._key1).add_(scores).argmax(-1)

    def from_candidates(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """Draw from softmax(scores [S, C]) of the tokens `token_ids`; int64 [S].

        The same as `from_all` would give with every other token's score at minus infinity.
        """
        noise = gumbel(self._hashed_tokens[token_ids], self._key0, self._key1)
        noisy = noise.add_(scores)
        best = noisy == noisy.amax(-1, keepdim=True)
        return token_ids.masked_fill(~best, torch.iinfo(torch.int64).max).amin(-1)


def choose_tokens(scores: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings) -> Tensor:
    """One token for each line of `scores` [S, V]; int32 [S].

    `rows` int64 [S] are the lines' rows; `positions` int32 holds, for each row of the table, the
    position of the token to choose. Among equals the lowest token id wins.
    """
    temperature = settings.temperature[rows]
    drawn = (temperature > 0).nonzero()[:, 0]
    if len(drawn) < len(rows):
        tokens = scores.argmax(-1)
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    if len(drawn):
        limits = _limits_of(rows, settings)
        keys = draw_keys(settings.seed_low[rows], settings.seed_high[rows], positions[rows])
        draw = Draw(hash_tokens(scores.shape[1], scores.device), *keys)
        filtered = limits.active[drawn]
        for lines in _pieces(drawn[~filtered], scores, MAX_ELEMENTS_IN_CACHE):
            tempered = _take(scores, lines).float() / temperature[lines, None]
            tokens[lines] = draw.lines(lines).from_all(tempered)
        for lines in _pieces(drawn[filtered], scores, MAX_ELEMENTS):
            tempered = _take(scores, lines).float() / temperature[lines, None]
            tokens[lines] = _choose_filtered(tempered, limits.lines(lines), draw.lines(lines))
    return tokens.int()


def token_cutoffs(scores: Tensor, rows: Tensor, settings: RowSettings) -> Tensor:
    """Lowest score kept in each line, once divided by the temperature; float32 [S].

    Minus infinity where nothing is filtered, or nothing could be kept.
    """
    temperature, limits = settings.temperature[rows][:, None], _limits_of(rows, settings)
    ordered = (scores.float() / temperature).sort(-1, descending=True).values
    found = cutoffs(ordered, limits)[0][:, 0]
    return found.masked_fill(~limits.active | (temperature[:, 0] == 0), -math.inf)


def _limits_of(rows: Tensor, settings: RowSettings) -> Limits:
    return Limits(
        settings.top_k[rows][:, None].long(),
        settings.top_p[rows][:, None],
        settings.log_min_p[rows][:, None],
    )


def _pieces(lines: Tensor, scores: Tensor, max_elements: int) -> Iterator[Tensor]:
    """`lines` in order, at most `max_elements` scores at a time."""
    if len(lines):
        yield from lines.split(max(1, max_elements // scores.shape[1]))


def _take(scores: Tensor, lines: Tensor) -> Tensor:
    """These lines of `scores`: a view where they are adjacent, else a copy."""
    first, last = int(lines[0]), int(lines[-1])
    if last - first == len(lines) - 1:
        return scores[first : last + 1]
    return scores.index_select(0, lines)


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


def _choose_filtered(scores: Tensor, limits: Limits, draw: Draw) -> Tensor:
    """Draw from tempered scores [S, V], which are consumed."""
    by_mass = (limits.top_k == 0) & (limits.top_p < 1.0)
    if bool((by_mass & (limits.log_min_p > -math.inf)).any()):
        floor = scores.amax(-1, keepdim=True) + limits.log_min_p
        scores.masked_fill_(scores < floor, -math.inf)
    if bool(by_mass.any()):
        limits = Limits(limits.top_k, limits.top_p, limits.log_min_p, _total_mass(scores))
    fewest = int(limits.top_k.min())
    usable = [n for n in CANDIDATES if fewest < n <= scores.shape[1] // 4]
    return _choose_narrowed(scores, limits, draw, usable)


def _choose_narrowed(scores: Tensor, limits: Limits, draw: Draw, widths: list[int]) -> Tensor:
    """Sort only the highest `widths[0]` scores; lines for which these are too few try again."""
    if not widths:
        ordered = scores.sort(-1, descending=True).values
        cutoff, _ = cutoffs(ordered, Limits(limits.top_k, limits.top_p, limits.log_min_p))
        return draw.from_all(scores.masked_fill_(scores < cutoff, -math.inf))
    ordered, token_ids = scores.topk(widths[0])
    cutoff, enough = cutoffs(ordered, limits)
    tokens = draw.from_candidates(ordered.masked_fill_(ordered < cutoff, -math.inf), token_ids)
    rest = (~enough).nonzero()[:, 0]
    if len(rest):
        again = (scores[rest], limits.lines(rest), draw.lines(rest))
        tokens[rest] = _choose_narrowed(*again, widths[1:])
    return tokens
