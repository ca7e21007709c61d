"""Random numbers that depend only on (seed, position, token id), and sampling by them.

A token is drawn by the Gumbel-max rule: the largest `logit + gumbel(seed, position, token)`. So a
request draws the same numbers whatever shares its batch, whichever row it has, and however few
candidates are looked at. This is the specification that kernels reproduce. All integers are 32
bits and wrap around; `>>` shifts in zeros; `^` is exclusive or:

    mix(x):    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    key0     = mix(low word of seed  ^ mix(position + 0x9E3779B9))
    key1     = mix(high word of seed ^ mix(position + key0))
    x        = mix(token + 0x9E3779B9) ^ key0
    bits     = mix(x), but with `x ^= key1` just after its first multiplication
    w        = float32(bits & 0x7FFFFFFF) * 2^-31 + 2^-32, at most 1 - 2^-24
    gumbel   = -log(-log1p(-w))

The conversion to float32 rounds to nearest even; the product is exact, so that a fused multiply-add
changes nothing. `w` keeps its full relative precision near 0, where the largest gumbels come from:
24 bits would be too coarse for a vocabulary of 2^17. `gumbel` is finite, in [-2.9, 22.2]. Up to `w`
all devices agree bit for bit; the logarithms may differ in the last place. Among equal sums the
lowest token id wins.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_FACTOR_1 = 0x7FEB352D
_FACTOR_2 = 0x846CA68B - (1 << 32)
_STRIDE = 0x9E3779B9 - (1 << 32)
_BITS_31 = 0x7FFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24


def _fold(x: Tensor, bits: int, scratch: Tensor) -> None:
    """x ^= x >> bits, in place; torch's shift copies the sign, so it is masked off."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    scratch.bitwise_and_((1 << (32 - bits)) - 1)
    x.bitwise_xor_(scratch)


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """`mix` of the module's description, in place, with `key` injected if there is one."""
    scratch = torch.empty_like(x)
    _fold(x, 16, scratch)
    x.mul_(_FACTOR_1)
    if key is not None:
        x.bitwise_xor_(key)
    _fold(x, 15, scratch)
    x.mul_(_FACTOR_2)
    _fold(x, 16, scratch)
    return x


@lru_cache(maxsize=4)
def hash_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """mix(token + 0x9E3779B9) for each token id: the part of the noise that never changes.

    Callers share the result and must not write to it.
    """
    return _mix(torch.arange(vocab_size, dtype=torch.int32, device=device) + _STRIDE)


def uniform(hashed_tokens: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """`w` [S, C] for hashed tokens [S, C] (or [C], the same for all lines) and keys [S]."""
    bits = _mix(hashed_tokens ^ key0[:, None], key1[:, None]).bitwise_and_(_BITS_31)
    return bits.to(torch.float32).mul_(2.0**-31).add_(2.0**-32).clamp_max_(_BELOW_ONE)


def gumbel(hashed_tokens: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    w = uniform(hashed_tokens, key0, key1)
    return w.neg_().log1p_().neg_().log_().neg_()


def draw_keys(low: Tensor, high: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`key0` and `key1` [S] for the words of the seeds and the positions of the tokens (int32)."""
    key0 = _mix(low ^ _mix(positions + _STRIDE))
    key1 = _mix(high ^ _mix(positions + key0))
    return key0, key1
