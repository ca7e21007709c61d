"""Packs quantised weights for the integer kernels of the native library; see src/quantized.h.

Integers and E2M1 keep their values, for scales are in float32. Inputs are rounded to 16 bits with a
scale for every 32, and to 8 where the checkpoint says that they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu.library import native, num_threads
from quire.kernels.cpu.linear import (
    ROWS_AT_ONCE,
    BlockMatrix,
    FloatMatrix,
    pack_floats,
    quantize_int8,
)
from quire.kernels.cpu.packing import CACHE_LINE, GROUP
from quire.kernels.torch.quantize import suits_half_scales, to_groups
from quire.kernels.torch.quantized_weights import GroupedWeights, QuantizedWeights, ScaledWeights

BLOCK = 32
"""Columns of a block, whose inputs are rounded together."""


def pack_weights(weights: QuantizedWeights) -> BlockMatrix | FloatMatrix:
    """The matrix that computes with these weights. Those with minima, which readers of GGUF files
    pack otherwise, and floats of 8 bits whose inputs are not rounded are in float32."""
    if isinstance(weights, GroupedWeights):
        if weights.minima is None:
            return pack_grouped(weights, input_planes=2)
    elif weights.values.dtype == torch.int8:
        return pack_grouped(group_integers(weights), 2 if weights.rounding is None else 1)
    elif weights.rounding is not None:
        return round_floats(weights)
    return pack_floats([weights.dequantize()])


def group_integers(weights: ScaledWeights) -> GroupedWeights:
    """The same as codes with scales for groups of inputs."""
    codes = weights.values.view(torch.uint8) ^ 128
    num_outputs, num_inputs = weights.shape
    if weights.block is None:
        return GroupedWeights(codes, 8, weights.scales[:, None], num_inputs)
    scales = weights.scales.repeat_interleave(weights.block[0], 0)[:num_outputs]
    return GroupedWeights(codes, 8, scales, weights.block[1])


def round_floats(weights: ScaledWeights) -> BlockMatrix:
    """Floats of 8 bits as integers with a scale for every 32 inputs. Where the floats have an error
    of 2.6 % (root mean square, of normal weights), that adds 0.55 %."""
    num_outputs, num_inputs = weights.shape
    data = []
    for rows in _floats(weights):
        if not suits_half_scales(rows):
            return _round_small_floats(weights)
        data.append(quantize_int8(F.pad(rows, (0, -num_inputs % BLOCK))).data)
    order = None
    if num_inputs % BLOCK:
        inputs = torch.arange(num_inputs, dtype=torch.int32)
        order = F.pad(inputs, (0, -num_inputs % BLOCK), value=-1)
    return BlockMatrix("Q8_0", num_outputs, num_inputs, torch.cat(data), order=order)


def _round_small_floats(weights: ScaledWeights) -> BlockMatrix:
    """The same with scales in float32."""
    parts = [to_groups(rows, 8, BLOCK) for rows in _floats(weights)]
    codes = torch.cat([one.codes for one in parts])
    scales = torch.cat([one.scales for one in parts])
    return pack_grouped(GroupedWeights(codes, 8, scales, BLOCK), input_planes=1)


def _floats(weights: ScaledWeights) -> Iterator[Tensor]:
    """Some rows after the other in float32, which take much memory."""
    block_outputs = 1 if weights.block is None else weights.block[0]
    unit = lcm(GROUP, block_outputs)
    step = -(-ROWS_AT_ONCE // unit) * unit
    for first in range(0, weights.shape[0], step):
        rows, scales = (slice(first // size, (first + step) // size) for size in (1, block_outputs))
        part = replace(weights, values=weights.values[rows], scales=weights.scales[scales])
        yield part.dequantize()


def pack_grouped(weights: GroupedWeights, input_planes: int) -> BlockMatrix:
    """Codes of 2 and 3 bits take 4, those of 6 take 8, and groups whole blocks of 32 inputs."""
    num_outputs, num_inputs = weights.shape
    bits = 4 if weights.bits <= 4 else 8
    codes, order, scale_blocks = _fill_blocks(weights)
    scales = weights.scales.float()
    zeros = weights.zeros
    if weights.is_e2m1:
        scales = scales * 0.5  # numbers are twice the floats
    else:
        middle = 1 << (weights.bits - 1)
        if bits != weights.bits:
            codes = codes + ((1 << (bits - 1)) - middle)
        if zeros is not None:
            zeros = (zeros.short() - middle).to(torch.int8)
    num_columns = codes.shape[1]
    number_bytes = GROUP * num_columns * bits // 8
    used = number_bytes + scales.shape[1] * GROUP * (4 if zeros is None else 5)
    groups = torch.zeros(-(-num_outputs // GROUP), used + -used % CACHE_LINE, dtype=torch.uint8)
    codes = codes.contiguous()
    native().quire_pack_codes(
        codes.data_ptr(),
        num_columns,
        num_outputs,
        num_columns,
        bits,
        groups.data_ptr(),
        groups.shape[1],
        num_threads(),
    )
    by_group = [_by_group(one).view(torch.uint8) for one in (scales, zeros) if one is not None]
    groups[:, number_bytes:used] = torch.cat(by_group, 2).flatten(1)
    return BlockMatrix(
        "GroupedE2M1" if weights.is_e2m1 else f"Grouped{bits}",
        num_outputs,
        num_inputs,
        groups,
        input_planes,
        order,
        scale_blocks,
        zeros is not None,
    )


def _fill_blocks(weights: GroupedWeights) -> tuple[Tensor, Tensor | None, int]:
    """Codes with groups of whole blocks, the order of their columns, and the blocks of a group."""
    codes, order = weights.codes, weights.order
    num_outputs, num_inputs = codes.shape
    size = min(weights.group_size, num_inputs)
    width = -(-size // BLOCK) * BLOCK
    inputs = torch.arange(num_inputs)
    places = inputs // size * width + inputs % size
    num_columns = (int(places[-1]) // BLOCK + 1) * BLOCK
    if num_columns != num_inputs:
        codes = codes.new_zeros(num_outputs, num_columns).index_copy_(1, places, codes)
        by_column = torch.full((num_columns,), -1, dtype=torch.int32)
        by_column[places] = (inputs if order is None else order).int()
        order = by_column
    return codes, None if order is None else order.int().contiguous(), width // BLOCK


def _by_group(rows: Tensor) -> Tensor:
    """[outputs, n] -> [groups of outputs, n, 32], the last filled with zeros."""
    filled = F.pad(rows, (0, 0, 0, -len(rows) % GROUP))
    return filled.view(-1, GROUP, rows.shape[1]).transpose(1, 2).contiguous()
