"""Numbers of 8 bits in kernels: integer operations widen and round them, on any GPU.

Codes of e5m2 are the upper bytes of float16. Those of e4m3 become float16 by moving their bits into
place, which divides them by 256: their scales are multiplied by that instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ONES = tl.constexpr(0x3F803F80)
"""Two scales of 1."""
SMALLEST_SCALE = tl.constexpr(2.0**-100)
"""As in the reference."""


@triton.jit
def widen(codes, E4M3: tl.constexpr, NVIDIA: tl.constexpr):
    """float16 of codes in uint8; of e4m3 divided by 256."""
    if E4M3 and NVIDIA:
        # Four codes at a time: two words with a code in each upper byte, then shifted by one.
        halves = tl.inline_asm_elementwise(
            """{
            .reg .b32 word, code, sign;
            prmt.b32 word, $2, 0, 0x1404;
            shr.b32 code, word, 1;
            and.b32 code, code, 0x3f803f80;
            and.b32 sign, word, 0x80008000;
            or.b32 $0, code, sign;
            prmt.b32 word, $2, 0, 0x3424;
            shr.b32 code, word, 1;
            and.b32 code, code, 0x3f803f80;
            and.b32 sign, word, 0x80008000;
            or.b32 $1, code, sign;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7) if E4M3 else wide << 8
        halves = bits.to(tl.float16, bitcast=True)
    return halves


@triton.jit
def widen_pairs(pairs, E4M3: tl.constexpr, NVIDIA: tl.constexpr):
    """float16 of the lower and of the upper codes of pairs in uint16; of e4m3 divided by 256.

    Both come in the layout that the pairs have, so that a tensor core's operand of 16 bits can be
    loaded as it is: single bytes could not be transposed on the way.
    """
    if E4M3 and NVIDIA:
        # Two pairs at a time.
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 code, sign;
            and.b32 code, $2, 0x007f007f;
            shl.b32 code, code, 7;
            and.b32 sign, $2, 0x00800080;
            shl.b32 sign, sign, 8;
            or.b32 $0, code, sign;
            shr.b32 code, $2, 1;
            and.b32 code, code, 0x3f803f80;
            and.b32 sign, $2, 0x80008000;
            or.b32 $1, code, sign;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif E4M3:
        lower = (((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)).to(tl.float16, bitcast=True)
        upper = ((pairs & 0x8000) | ((pairs & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
    else:
        lower = (pairs << 8).to(tl.float16, bitcast=True)
        upper = (pairs & 0xFF00).to(tl.float16, bitcast=True)
    return lower, upper


@triton.jit
def scales_of(words, E4M3: tl.constexpr):
    """Of words with the scales of a key and a value in bfloat16: those of widened codes."""
    unit: tl.constexpr = 256.0 if E4M3 else 1.0
    k_scale = (words << 16).to(tl.float32, bitcast=True) * unit
    v_scale = (words & -65536).to(tl.float32, bitcast=True) * unit
    return k_scale, v_scale


@triton.jit
def choose_scale(largest, given, E4M3: tl.constexpr):
    """The scale of a head with such a largest magnitude, or a given one; rounded up to bfloat16."""
    scale = largest / (448.0 if E4M3 else 57344.0)
    scale = tl.where(given > 0, given, tl.maximum(scale, SMALLEST_SCALE))
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
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
        "NVIDIA": kv_layer.is_cuda and torch.version.hip is None,
    }
