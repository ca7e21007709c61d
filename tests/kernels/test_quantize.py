"""Rounding of matrices: each number is the nearest one that the format has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.torch import quantize
from quire.kernels.torch.quantize import to_fp8, to_groups, to_int8
from quire.protocol.errors import ModelError


def matrix(
    num_outputs: int = 6, num_inputs: int = 40, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(num_outputs * num_inputs)
    return torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)


def nearest(weight: Tensor, values: Tensor) -> Tensor:
    """Of [outputs, inputs, choices], the one that is nearest to each weight."""
    best = (weight[..., None] - values).abs().argmin(-1, keepdim=True)
    return values.gather(-1, best)[..., 0]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "ELEMENTS_AT_ONCE", 100)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"),
    [(2, 8, torch.float32), (4, 16, torch.bfloat16), (8, 64, torch.float16)],
)
def test_codes_are_the_nearest(
    bits: int, group_size: int, dtype: torch.dtype, is_symmetric: bool
) -> None:
    weight = matrix(dtype=dtype)
    made = to_groups(weight.float(), bits, group_size, False, is_symmetric, scale_dtype=dtype)
    groups = -(-40 // group_size)
    assert made.codes.shape == (6, 40) and made.scales.shape == (6, groups)
    assert made.scales.dtype == dtype and int(made.codes.max()) < 2**bits
    by_input = torch.arange(40) // group_size
    zero = torch.full((6, groups), 2 ** (bits - 1)) if made.zeros is None else made.zeros
    choices = torch.arange(2**bits) - zero[..., None].float()
    values = (choices * made.scales.float()[..., None])[:, by_input]
    error = (made.dequantize() - weight.float()).abs()
    least = (nearest(weight.float(), values) - weight.float()).abs()
    torch.testing.assert_close(error, least, rtol=0, atol=1e-6)
    spans = made.scales.float() * (2**bits - 1)
    for group in range(groups):
        part = weight.float()[:, by_input == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * torch.maximum(-low, high) if is_symmetric else high - low
        torch.testing.assert_close(spans[:, group], span, rtol=0.01, atol=0)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_search_lessens_the_error_that_counts(is_symmetric: bool) -> None:
    weight = matrix(8, 96)
    weight[:, 5] *= 6
    importance = torch.ones(96)
    importance[5] = 0.001

    def error(**options: object) -> tuple[Tensor, Tensor]:
        made = to_groups(weight, 4, 32, is_symmetric=is_symmetric, **options)  # type: ignore[arg-type]
        squared = (made.dequantize() - weight).square()
        by_group = lambda x: x.unflatten(1, (-1, 32)).sum(-1)  # noqa: E731
        return by_group(squared), by_group(squared * importance)

    plain, plain_counted = error()
    searched, searched_counted = error(search=True)
    counted, important = error(search=True, importance=importance)
    assert (searched <= plain).all() and searched.sum() < 0.95 * plain.sum()
    assert (important <= plain_counted).all() and important.sum() < searched_counted.sum()
    assert counted.sum() > searched.sum()


def test_fp8_and_int8_keep_a_scale_per_output() -> None:
    weight = matrix(7, 33, torch.bfloat16)
    weight[2] *= 1000
    for made, largest in ((to_fp8(weight), 448.0), (to_int8(weight), 127.0)):
        peak = weight.float().abs().amax(1)
        torch.testing.assert_close(made.scales, peak / largest)
        every = torch.arange(-127, 128).float()
        if made.values.dtype == torch.float8_e4m3fn:
            every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
            every = every[every.isfinite()]
        values = (made.scales[:, None] * every)[:, None].expand(7, 33, -1)
        error = (made.dequantize() - weight.float()).abs()
        least = (nearest(weight.float(), values) - weight.float()).abs()
        torch.testing.assert_close(error, least, rtol=0, atol=1e-4)
        assert made.rounding is not None and made.rounding.dtype == made.values.dtype
        assert made.rounding.scale is None and made.rounding.group_size is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    weight = matrix(4, 48, dtype)
    weight[1] = 0
    weight[3, 16:32] = 0
    made = (
        to_groups(weight, 4, 16, search=True),
        to_groups(weight, 4, 16, is_symmetric=False),
        to_fp8(weight),
        to_int8(weight),
    )
    for one in made:
        whole = one.dequantize()
        assert whole.isfinite().all() and not whole[1].any() and not whole[3, 16:32].any()
    assert to_int8(weight[:0]).shape == (0, 48) and to_groups(weight[:0]).shape == (0, 48)


@pytest.mark.parametrize("round_to", [to_groups, to_fp8, to_int8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(round_to, value: float) -> None:  # type: ignore[no-untyped-def]
    weight = matrix()
    weight[4, 7] = value
    with pytest.raises(ModelError, match=rf"output 4 and input 7 is {value}"):
        round_to(weight)
