"""Numbers of 8 bits in kernels.

GPUs of NVIDIA from Ada on have instructions that widen codes; elsewhere integer operations do it.
Codes of e5m2 are the upper bytes of float16. Those of e4m3 become float16 by moving their bits into
place, which divides them by 256: their scales are multiplied by that instead.

A scale of values is a power of 2, whose logarithm and inverse cost no more than an addition; codes
have exponents of their own, so little is lost by that. Scales of keys have the digits of bfloat16,
so that the largest number of a key, on which scores depend most, is the largest code.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.unpacking import widen_e4m3, widen_e4m3_pairs, widen_e5m2_pairs

ONES = tl.constexpr(0x3F803F80)
"""Two scales of 1."""
SMALLEST_SCALE = tl.constexpr(2.0**-100)
"""As in the reference."""


@triton.jit
def widen(codes, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """float16 of codes in uint8; of e4m3 divided by 256 where it is not `NATIVE`."""
    if E4M3 and NATIVE:
        halves = widen_e4m3(codes)
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7) if E4M3 else wide << 8
        halves = bits.to(tl.float16, bitcast=True)
    return halves


@triton.jit
def widen_pairs(pairs, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """As `widen`: the lower and the upper codes of pairs in uint16.

    Both come in the layout that the pairs have, so that a tensor core's operand of 16 bits can be
    loaded as it is: single bytes could not be transposed on the way.
    """
    if E4M3 and NATIVE:
        lower, upper = widen_e4m3_pairs(pairs)
    elif NATIVE:
        lower, upper = widen_e5m2_pairs(pairs)
    elif E4M3:
        lower = (((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)).to(tl.float16, bitcast=True)
        upper = ((pairs & 0x8000) | ((pairs & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
    else:
        lower = (pairs << 8).to(tl.float16, bitcast=True)
        upper = (pairs & 0xFF00).to(tl.float16, bitcast=True)
    return lower, upper


@triton.jit
def scales_of(words, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Of words with the scales of a key and a value in bfloat16: that of the widened key, and of
    the value's its logarithm to the base of 2 and its inverse, which are quick for a power of 2."""
    SHIFT: tl.constexpr = 8 if E4M3 and not NATIVE else 0  # by how much widening divides
    k_scale = (words << 16).to(tl.float32, bitcast=True) * 2.0**SHIFT
    exponent = (words >> 23) & 0xFF
    # Read as a number between 2 ** 23 and 2 ** 24, the exponent is its last digits.
    v_log2 = (exponent | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 127 - SHIFT)
    v_inverse = ((254 - SHIFT - exponent) << 23).to(tl.float32, bitcast=True)
    return k_scale, v_log2, v_inverse


@triton.jit
def choose_scale(largest, given, E4M3: tl.constexpr, OF_VALUES: tl.constexpr):
    """The scale of a head with such a largest magnitude, or a given one, rounded up."""
    scale = largest / (448.0 if E4M3 else 57344.0)
    scale = tl.where(given > 0, given, tl.maximum(scale, SMALLEST_SCALE))
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000 if OF_VALUES else (bits + 0xFFFF) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, E4M3: tl.constexpr):
    """Codes in uint8 of float32: the nearest, of two the even one, at most the largest."""
    # So that the exponent's lowest bits are those of the code; tiny numbers become subnormal.
    if E4M3:
        bits = (x * 2.0**-120).to(tl.int32, bitcast=True)
        code = bits & 0x7FFFFFFF
        code = tl.minimum((code + 0x7FFFF + ((code >> 20) & 1)) >> 20, 0x7E)
    else:
        bits = (x * 2.0**-112).to(tl.int32, bitcast=True)
        code = bits & 0x7FFFFFFF
        code = tl.minimum((code + 0xFFFFF + ((code >> 21) & 1)) >> 21, 0x7B)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fitted_queries(q):
    """Queries for products with widened codes, and what the products are to be multiplied by.

    In bfloat16 they may be too large for float16: they are divided by a power of two, which is
    exact, so that all are below 2.
    """
    if q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.max(tl.abs(wide), 1), 0), 2.0**-60)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        fitted = (wide / power).to(tl.float16)
    else:
        fitted, power = q, 1.0
    return fitted, power


def float8_options(kv_layer: Tensor) -> dict[str, Any]:
    """For a launch of a kernel that reads a cache of this type."""
    return {
        "FLOAT8": kv_layer.element_size() == 1,
        "E4M3": kv_layer.dtype == torch.float8_e4m3fn,
        "NATIVE": kv_layer.is_cuda and _has_conversion(kv_layer.device),
    }


@cache
def _has_conversion(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
