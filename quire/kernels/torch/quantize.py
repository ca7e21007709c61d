"""Rounds matrices of floats to quantised ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.kernels.torch.quantized_weights import GroupedWeights, InputRounding, ScaledWeights
from quire.protocol.errors import ModelError

# Bounds the memory for intermediate results, of which a few are held in float32.
ELEMENTS_AT_ONCE = 1 << 22
SMALLEST_HALF_SCALE = 2.0**-16
# Clipping ranges that a search tries, in parts of the range of a group's weights.
SHARES = tuple(0.6 + 0.025 * step for step in range(20))


def to_groups(
    weight: Tensor,
    bits: int = 4,
    group_size: int = 128,
    search: bool = False,
    is_symmetric: bool = True,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> GroupedWeights:
    """Codes to the nearest; scales are of `scale_dtype`, or of the weight's own.

    `search` chooses the range of each group that has the least squared error, in which an input
    counts by its `importance` [inputs], such as the mean of its squares. Zeros are among the codes,
    so weights of 0 stay 0.
    """
    num_outputs, num_inputs = weight.shape
    dtype = weight.dtype if scale_dtype is None else scale_dtype
    padding = -num_inputs % group_size
    counts = torch.ones(num_inputs) if importance is None else importance.float()
    counts = torch.nn.functional.pad(counts, (0, padding)).to(weight.device)
    num_groups = len(counts) // group_size
    codes = weight.new_empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = weight.new_empty(num_outputs, num_groups, dtype=dtype)
    zeros = None
    if not is_symmetric:
        zeros = weight.new_empty(num_outputs, num_groups, dtype=torch.uint8)
    for part in _chunks(weight):
        padded = torch.nn.functional.pad(weight[part].float(), (0, padding))
        groups = padded.unflatten(1, (num_groups, group_size))
        find = _symmetric_range if is_symmetric else _asymmetric_range
        scale, zero = find(groups, bits, dtype, 1.0)
        if search:
            least = _error(groups, scale, zero, bits, counts)
            for share in SHARES:
                other, other_zero = find(groups, bits, dtype, share)
                error = _error(groups, other, other_zero, bits, counts)
                is_better = error < least
                least = torch.where(is_better, error, least)
                scale = torch.where(is_better, other, scale)
                zero = torch.where(is_better, other_zero, zero)
        codes[part] = _codes(groups, scale, zero, bits).flatten(1)[:, :num_inputs].to(torch.uint8)
        scales[part] = scale[..., 0].to(dtype)
        if zeros is not None:
            zeros[part] = zero[..., 0].to(torch.uint8)
    return GroupedWeights(codes, bits, scales, group_size, zeros)


def suits_half_scales(weight: Tensor) -> bool:
    """Whether blocks of 8 bits, with largest weights of 127, may have scales in float16: those of
    each output, but for the smaller ones, need 9 digits of it or more."""
    largest = weight.abs().amax(1).float() / 127
    is_fine = (largest >= SMALLEST_HALF_SCALE) & (largest <= torch.finfo(torch.float16).max)
    return bool((is_fine | (largest == 0)).all())


def to_fp8(weight: Tensor) -> ScaledWeights:
    """float8_e4m3fn with a scale for each output; inputs are rounded alike, token by token."""
    return _to_scaled(
        weight, torch.float8_e4m3fn, 448.0, lambda scaled: scaled.clamp(-448.0, 448.0)
    )


def to_int8(weight: Tensor) -> ScaledWeights:
    """int8 with a scale for each output; inputs are rounded alike, token by token."""
    return _to_scaled(weight, torch.int8, 127.0, torch.round)


def _to_scaled(
    weight: Tensor, dtype: torch.dtype, largest: float, fit: Callable[[Tensor], Tensor]
) -> ScaledWeights:
    values = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    for part in _chunks(weight):
        rows = weight[part].float()
        scale = _positive(rows.abs().amax(1, keepdim=True) / largest, torch.float32)
        values[part] = fit(rows / scale).to(dtype)
        scales[part] = scale[:, 0]
    return ScaledWeights(values, scales, rounding=InputRounding(dtype))


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Rows that are rounded at a time, checked to be numbers."""
    num_rows = max(1, ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), num_rows):
        part = slice(start, start + num_rows)
        check_finite(weight[part], start)
        yield part


def check_finite(weight: Tensor, first_output: int = 0) -> None:
    """Refuse what cannot be rounded."""
    is_finite = weight.isfinite()
    if not is_finite.all():
        row, column = (~is_finite).nonzero()[0].tolist()
        raise ModelError(
            f"weight of output {first_output + row} and input {column} is "
            f"{weight[row, column].item()}, which cannot be quantised; the checkpoint is damaged."
        )


def _symmetric_range(
    groups: Tensor, bits: int, dtype: torch.dtype, share: float
) -> tuple[Tensor, Tensor]:
    """(scales, zeros) [outputs, groups, 1] for a share of the range, both in float32."""
    width = 2 * groups.abs().amax(-1, keepdim=True)
    scale = _positive(share * width / (2**bits - 1), dtype)
    return scale, torch.full_like(scale, 2 ** (bits - 1))


def _asymmetric_range(
    groups: Tensor, bits: int, dtype: torch.dtype, share: float
) -> tuple[Tensor, Tensor]:
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scale = _positive(share * (high - low) / (2**bits - 1), dtype)
    return scale, (-share * low / scale).round().clamp(0, 2**bits - 1)


def _positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored; that of zeros is the smallest one."""
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype).float()


def _codes(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return ((groups / scale).round() + zero).clamp(0, 2**bits - 1)


def _error(groups: Tensor, scale: Tensor, zero: Tensor, bits: int, counts: Tensor) -> Tensor:
    """Squared errors [outputs, groups, 1]."""
    difference = (_codes(groups, scale, zero, bits) - zero) * scale - groups
    counted = difference.square() * counts.view(-1, groups.shape[-1])
    return counted.sum(-1, keepdim=True)
