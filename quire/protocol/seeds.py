"""Where 64-bit seeds come from: the user's, a child's of `n > 1`, or the engine's for the unseeded.

All steps are splitmix64, so that neighbouring inputs give unrelated seeds, equal on every machine.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """splitmix64's output function: a bijection of 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request; completion 0 keeps the request's own seed.

    So the first of `n` completions is the one that `n=1` would have given.
    """
    if index == 0:
        return seed & _MASK
    return _mix(seed + index * _STRIDE)


def random_seed(engine_seed: int, counter: int) -> int:
    """Seed of the `counter`-th request that brought none, reproducible from the engine's seed."""
    return _mix(_mix(engine_seed + _STRIDE) + counter * _STRIDE)
