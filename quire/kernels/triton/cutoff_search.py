"""Exact division by a temperature, and the exact search for a cutoff among the logits of one line.

Logits are searched as integers that order as they do. Masses are integers too, so that the order of
summation moves no cutoff.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter does not fuse a multiply-add.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def divide(x, divisor):
    """x / divisor, rounded correctly, for a scalar divisor.

    Unlike the hardware's division this takes no branches, which would keep it from working on many
    logits at a time: a product with the reciprocal, corrected twice by what it misses.
    """
    if INTERPRETED:
        return tl.div_rn(x, divisor)
    else:
        reciprocal = tl.div_rn(1.0, divisor)
        first = x * reciprocal
        second = tl.fma(tl.fma(-first, divisor, x), reciprocal, first)
        third = tl.fma(tl.fma(-second, divisor, x), reciprocal, second)
        return tl.where(tl.abs(first) < float("inf"), third, first)


@triton.jit
def to_key(x):
    """An integer that orders as the float does; the sum makes one zero of two."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(logit, best):
    """exp(logit - best) in units of 2^-44, so that the masses of 2^18 tokens fit 63 bits.

    Fused products recover what rounding the exponent lost; the factors are log2(e), as a sum of
    two, and ln(2).
    """
    below = tl.maximum(logit - best, -100.0)
    exponent = below * 1.4426950216293335
    lost = tl.fma(below, 1.4426950216293335, -exponent)
    lost = tl.fma(below, 1.92596299112661746887e-08, lost)
    return (tl.exp2(exponent) * (1.0 + lost * 0.6931471805599453) * 17592186044416.0).to(tl.int64)


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
    """How many of the `count` logits at `ptr` are above that of `key`, or their mass.

    Also the key of the lowest logit above it, and that of the highest logit not above it.
    """
    weights = tl.zeros([TILE], tl.int64)
    next_above = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    next_below = tl.full([TILE], -0x7FFFFFFF, tl.int32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(ptr + at, at < count, float("-inf")).to(tl.float32)
        if not TEMPERED:
            x = divide(x, temperature)
        own = to_key(x)
        above = own > key
        next_above = tl.minimum(next_above, tl.where(above, own, 0x7FFFFFFF))
        next_below = tl.maximum(next_below, tl.where(above, -0x7FFFFFFF, own))
        if BY_MASS:
            weights += tl.where(above, mass_of(x, best), 0)
        else:
            weights += tl.where(above, 1, 0)
    return tl.sum(weights, 0), tl.min(next_above, 0), tl.max(next_below, 0)


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
    """The lowest key in [low, high] with a weight below `limit` above it.

    Keys between two neighbouring logits have the same weight above them, so each try takes the
    bracket on to the next logit. Where many logits are equal that saves most of the tries.
    """
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean rounded down, without overflow
        above, next_above, next_below = weight_above(
            ptr, count, temperature, best, middle, BY_MASS, TEMPERED, TILE
        )
        few = (base + above).to(tl.float64) < limit
        high_if_few = tl.maximum(next_below, low)
        low_if_many = tl.minimum(next_above, high)
        high = tl.where(few, high_if_few, high)
        low = tl.where(few, low, low_if_many)
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
    """The cutoff, which lies in [low, high], by a search among `count` logits at `ptr`.

    `base` is the mass above those logits, `left` the mass that top_p is a share of; where that is
    0, it is found here. Logits not yet `TEMPERED` are divided by the temperature.
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
            left, _, _ = weight_above(
                ptr, count, temperature, best, lowest - 1, True, TEMPERED, TILE
            )
        limit = top_p.to(tl.float64) * left.to(tl.float64)
        lowest = _search(
            ptr, count, temperature, best, base, limit, lowest, highest, True, TEMPERED, TILE
        )
    return from_key(lowest)
