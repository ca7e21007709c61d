"""The exact search for a cutoff among the scores of one line, by one program.

Scores are searched as integers that order as they do. Masses are integers too, so that the order of
summation moves no cutoff.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Masses are counted in units of 2^-44 of the likeliest token's; those of 2^18 tokens fit 63 bits.
UNITS = tl.constexpr(17592186044416.0)
LOG2E_HIGH = tl.constexpr(1.4426950216293335)
LOG2E_LOW = tl.constexpr(1.92596299112661746887e-08)
LN2 = tl.constexpr(0.6931471805599453)
ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def to_key(x):
    """An integer that orders as the float does; the sum makes one zero of two."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & ALL_BUT_SIGN)


@triton.jit
def from_key(key):
    return (key ^ ((key >> 31) & ALL_BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(score, best):
    """exp(score - best) in units. Fused products recover what rounding the exponent lost."""
    below = tl.maximum(score - best, -100.0)
    exponent = below * LOG2E_HIGH
    lost = tl.fma(below, LOG2E_LOW, tl.fma(below, LOG2E_HIGH, -exponent))
    return (tl.exp2(exponent) * (1.0 + lost * LN2) * UNITS).to(tl.int64)


@triton.jit
def weight_above(
    ptr,
    count,
    temperature,
    best,
    key,
    BY_MASS: tl.constexpr,
    TEMPERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many of the `count` scores at `ptr` are above that of `key`, or their mass."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(ptr + at, at < count, float("-inf")).to(tl.float32)
        if not TEMPERED:
            x = tl.div_rn(x, temperature)
        if BY_MASS:
            total += tl.where(to_key(x) > key, mass_of(x, best), 0)
        else:
            total += tl.where(to_key(x) > key, 1, 0)
    return tl.sum(total, 0)


@triton.jit
def _search(
    ptr,
    count,
    temperature,
    best,
    base,
    limit,
    low,
    high,
    BY_MASS: tl.constexpr,
    TEMPERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The lowest key in [low, high] with a weight below `limit` above it."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean rounded down, without overflow
        above = weight_above(ptr, count, temperature, best, middle, BY_MASS, TEMPERED, TILE)
        few = (base + above).to(tl.float64) < limit
        high = tl.where(few, middle, high)
        low = tl.where(few, low, middle + 1)
    return low


@triton.jit
def find_cutoff(
    ptr,
    count,
    temperature,
    top_k,
    top_p,
    best,
    floor,
    low,
    high,
    base,
    left,
    TEMPERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The cutoff, which lies in [low, high], by a search among `count` scores at `ptr`.

    `base` is the mass above those scores, `left` the mass that top_p is a share of; where that is
    0, it is found here. Scores not yet `TEMPERED` are divided by the temperature.
    """
    lowest, highest = to_key(low), to_key(high)
    if top_k > 0:
        limit = top_k.to(tl.float64)
        lowest = _search(
            ptr, count, temperature, best, 0, limit, lowest, highest, False, TEMPERED, TILE
        )
    lowest = tl.maximum(lowest, to_key(tl.maximum(floor, low)))
    if top_p < 1.0:
        if left == 0:
            left = weight_above(ptr, count, temperature, best, lowest - 1, True, TEMPERED, TILE)
        limit = top_p.to(tl.float64) * left.to(tl.float64)
        lowest = _search(
            ptr, count, temperature, best, base, limit, lowest, highest, True, TEMPERED, TILE
        )
    return from_key(lowest)
