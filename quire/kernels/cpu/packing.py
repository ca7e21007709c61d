"""Rearranges the blocks of a GGUF file into the groups of rows that src/quantized.h describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quire.kernels.torch.gguf_blocks import (
    BLOCK_SIZES,
    q4_k_numbers,
    q6_k_numbers,
    scales_and_minima,
)

GROUP = 32
CACHE_LINE = 64
# Groups that are packed at a time, to bound the memory for what lies between.
GROUPS_AT_ONCE = 64

Split = tuple[Tensor, list[Tensor]]
"""Of n blocks: bytes [n, lines * 4], of which each line of a group gets 4, and scales
[n, count, width], of which a group gets `count` times 32 of `width` bytes."""


def pack_rows(kind: str, rows: Tensor) -> Tensor:
    """Stored rows [outputs, bytes] -> groups [outputs / 32, bytes], the last filled with zeros."""
    parts = [pack_groups(kind, part) for part in rows.split(GROUPS_AT_ONCE * GROUP)]
    return torch.cat(parts)


def int8_group_bytes(num_inputs: int) -> int:
    """What a group of rows takes in 8 bits: a number for each weight, a float16 for every 32."""
    return GROUP * (num_inputs + num_inputs // 16)


@cache
def group_bytes(kind: str, num_inputs: int) -> int:
    """What a group of rows takes in blocks of this kind."""
    block_elements, block_bytes = BLOCK_SIZES[kind]
    row_bytes = num_inputs // block_elements * block_bytes
    return pack_groups(kind, torch.zeros(GROUP, row_bytes, dtype=torch.uint8)).nbytes


def pack_groups(kind: str, rows: Tensor) -> Tensor:
    """The same for rows that are not too many."""
    missing = -len(rows) % GROUP
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
    _, block_bytes = BLOCK_SIZES[kind]
    num_groups, num_blocks = len(rows) // GROUP, rows.shape[1] // block_bytes
    numbers, scales = SPLITTERS[kind](rows.reshape(-1, block_bytes))
    lines = numbers.view(torch.int32).view(num_groups, GROUP, -1).transpose(1, 2)
    parts = [
        scale.view(num_groups, GROUP, num_blocks, *scale.shape[1:])
        .permute(0, 2, 3, 1, 4)
        .reshape(num_groups, num_blocks, -1)
        for scale in scales
    ]
    packed = torch.cat(
        (
            lines.contiguous().view(torch.uint8).view(num_groups, -1),
            torch.cat(parts, dim=2).view(num_groups, -1),
        ),
        dim=1,
    )
    return torch.nn.functional.pad(packed, (0, -packed.shape[1] % CACHE_LINE))


def halves(blocks: Tensor, start: int, count: int) -> Tensor:
    """`count` float16 from byte `start` on, as scales of a Split."""
    return blocks[:, start : start + 2 * count].reshape(-1, count, 2)


def join_nibbles(numbers: Tensor) -> Tensor:
    """[n, blocks, 32] numbers from 0 to 15 -> [n, blocks, 16] bytes."""
    return numbers[..., :16] | numbers[..., 16:] << 4


def split_q8_0(blocks: Tensor) -> Split:
    return blocks[:, 2:] ^ 128, [halves(blocks, 0, 1)]


def split_q4_0(blocks: Tensor) -> Split:
    return blocks[:, 2:].contiguous(), [halves(blocks, 0, 1)]


def split_q4_1(blocks: Tensor) -> Split:
    return blocks[:, 4:].contiguous(), [halves(blocks, 0, 2)]


def split_q4_k(blocks: Tensor) -> Split:
    numbers = join_nibbles(q4_k_numbers(blocks)).flatten(1)
    factors = torch.stack(scales_and_minima(blocks), dim=2)
    return numbers, [halves(blocks, 0, 2), factors.view(-1, 16, 1)]


def split_q6_k(blocks: Tensor) -> Split:
    numbers = q6_k_numbers(blocks).view(-1, 8, 32)
    high = (numbers >> 4).view(-1, 8, 2, 4, 4)
    joined = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    lines = torch.cat((join_nibbles(numbers & 15), joined.flatten(2)), dim=2)
    return lines.flatten(1), [halves(blocks, 208, 1), blocks[:, 192:208].reshape(-1, 16, 1)]


SPLITTERS: dict[str, Callable[[Tensor], Split]] = {
    "Q8_0": split_q8_0,
    "Q4_0": split_q4_0,
    "Q4_1": split_q4_1,
    "Q4_K": split_q4_k,
    "Q6_K": split_q6_k,
}
