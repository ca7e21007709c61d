"""Codes of a few bits widened by NVIDIA's instructions, several at a time. Kernels in Triton call
these where the GPU has them, and do the same by integer operations elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl


def _bits(field: int, mask: str, exponent: str, shift: int) -> str:
    """PTX that puts the codes of a field, of two elements, into the fractions of two halves."""
    return (
        f"prmt.b32 two, $1, $2, {'0x5410' if field < 4 else '0x7632'};\n"
        f"shr.b32 two, two, {shift};\n"
        f"lop3.b32 two, two, {mask}, {exponent}, 0xea;\n"
    )


def _in_place(field: int) -> str:
    """Every other field in float16, with a shift less: the halves are 64 + code."""
    return _bits(field, "0x00f000f0", "0x54005400", 4 * (field % 4) - 4)


def _lowest(field: int, exponent: str) -> str:
    """The halves are 2 ** n + code: 1024 and more in float16, 128 and more in bfloat16."""
    return _bits(field, "0x000f000f", exponent, 4 * (field % 4))


def _raised(field: int, is_float16: bool) -> str:
    if not is_float16:
        bits = _lowest(field, "0x43004300")
    else:
        bits = _in_place(field) if field % 2 else _lowest(field, "0x64006400")
    return f"{{ .reg .b32 two;\n{bits}mov.b32 $0, two; }}"


def _lessened(field: int, is_float16: bool) -> str:
    """The same less the last operand, which is 2 ** n + zero: code - zero, exactly."""
    if not is_float16:
        return f"{{ .reg .b32 two;\n{_lowest(field, '0x43004300')}sub.rn.bf16x2 $0, two, $3; }}"
    if field % 2 == 0:
        return f"{{ .reg .b32 two;\n{_lowest(field, '0x64006400')}sub.rn.f16x2 $0, two, $3; }}"
    # 64 + zero is 960 less than 1024 + zero.
    return (
        "{ .reg .b32 two, less;\n"
        f"{_in_place(field)}"
        "mov.b32 less, 0x63806380;\n"
        "sub.rn.f16x2 less, $3, less;\n"
        "sub.rn.f16x2 $0, two, less; }"
    )


TO_FLOAT16 = tl.constexpr(tuple(_lessened(field, True) for field in range(8)))
TO_BFLOAT16 = tl.constexpr(tuple(_lessened(field, False) for field in range(8)))
RAISED_FLOAT16 = tl.constexpr(tuple(_raised(field, True) for field in range(8)))
RAISED_BFLOAT16 = tl.constexpr(tuple(_raised(field, False) for field in range(8)))


@triton.jit
def unpack_codes(words, zero, FIELD: tl.constexpr, dtype: tl.constexpr):
    """code - zero of a field, for words [outputs, RUN] of eight codes and zero [outputs, 1]."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            TO_FLOAT16[FIELD], "=r,r,r,r", [words, (zero + 1024).to(dtype)], tl.float16, True, 2
        )
    else:
        return tl.inline_asm_elementwise(
            TO_BFLOAT16[FIELD], "=r,r,r,r", [words, (zero + 128).to(dtype)], tl.bfloat16, True, 2
        )


@triton.jit
def widen_e4m3(codes):
    """float16 of codes in uint8, four at a time; from Ada on."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 lower, upper;
        mov.b32 {lower, upper}, $2;
        cvt.rn.f16x2.e4m3x2 $0, lower;
        cvt.rn.f16x2.e4m3x2 $1, upper;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def widen_e4m3_pairs(pairs):
    """float16 of the lower and of the upper codes of pairs in uint16; from Ada on."""
    # Two pairs at a time: lower bytes and upper bytes are brought together, and converted.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 two, none;
        prmt.b32 bytes, $2, 0, 0x4420;
        mov.b32 {two, none}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, two;
        prmt.b32 bytes, $2, 0, 0x4431;
        mov.b32 {two, none}, bytes;
        cvt.rn.f16x2.e4m3x2 $1, two;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def widen_e5m2_pairs(pairs):
    """The same of e5m2, whose codes are the upper bytes of float16; on any GPU of NVIDIA."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
