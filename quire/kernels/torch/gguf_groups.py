"""Blocks of GGUF files as grouped weights, for devices whose kernels compute with these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.torch.gguf_blocks import (
    BLOCK_SIZES,
    BlockRows,
    half,
    nibbles,
    powers,
    q4_k_numbers,
    q6_k_numbers,
    scales_and_minima,
)
from quire.kernels.torch.quantized_weights import GroupedWeights

Parts = tuple[int, Tensor, Tensor, Tensor | None]
"""Bits, codes [blocks, elements], scales and minima [blocks, groups]."""


def _q8_0(blocks: Tensor) -> Parts:
    return 8, blocks[:, 2:] ^ 128, half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return 4, nibbles(blocks[:, None, 2:]).flatten(1), half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return 4, nibbles(blocks[:, None, 4:]).flatten(1), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: Tensor) -> Parts:
    scales, minima = scales_and_minima(blocks)
    codes = q4_k_numbers(blocks).flatten(1)
    return 4, codes, half(blocks, 0) * scales, half(blocks, 2) * minima.float().neg()


def _q6_k(blocks: Tensor) -> Parts:
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return 6, q6_k_numbers(blocks), scales, None


def _mxfp4(blocks: Tensor) -> Parts:
    return 4, nibbles(blocks[:, None, 1:]).flatten(1), powers(blocks), None


_KINDS: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
GROUPED_KINDS = frozenset(_KINDS)
"""What `group_blocks` takes."""


def group_blocks(stored: BlockRows) -> GroupedWeights:
    """The same numbers. Scales and minima are rounded to float16 where they are products, unless
    they are too small for it."""
    num_outputs, num_inputs = stored.shape
    _, block_bytes = BLOCK_SIZES[stored.kind]
    bits, codes, scales, minima = _KINDS[stored.kind](stored.rows.reshape(-1, block_bytes))
    by_output = scales.reshape(num_outputs, -1)
    return GroupedWeights(
        codes.reshape(num_outputs, num_inputs),
        bits,
        _rounded(by_output),
        num_inputs // by_output.shape[1],
        minima=None if minima is None else _rounded(minima.reshape(num_outputs, -1)),
        is_e2m1=stored.kind == "MXFP4",
    )


def _rounded(numbers: Tensor) -> Tensor:
    narrow = numbers.half()
    is_close = (narrow.float() - numbers).abs() <= numbers.abs() * 2**-11
    return narrow if bool(is_close.all()) else numbers
