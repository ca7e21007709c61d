"""Weights of quantised checkpoints in the native kernels, next to what they mean.

Compared with: products in float64 of `dequantize()`, the specification, which has tests of its own.
A change that loses a zero or a scale, mixes up groups, columns or rows, saturates a product or lets
the other tokens of a batch touch a result turns these red.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu.linear import BlockMatrix, FloatMatrix
from quire.kernels.cpu.quantized import pack_weights
from quire.kernels.torch import linear as blocks
from quire.kernels.torch.quantize import to_fp8
from quire.kernels.torch.quantized_weights import (
    E2M1,
    GroupedWeights,
    InputRounding,
    QuantizedWeights,
    ScaledWeights,
)
from quire.layers.quantization.matrices import make_matrix
from quire.layers.quantization.packed import PackInt8


def make_grouped(
    bits: int,
    shape: tuple[int, int],
    group_size: int,
    has_zeros: bool = False,
    is_ordered: bool = False,
    seed: int = 0,
) -> GroupedWeights:
    """Random codes, with scales of all sizes; `bits` of 0 stands for E2M1."""
    generator = torch.Generator().manual_seed(seed)
    (num_outputs, num_inputs), is_e2m1 = shape, bits == 0
    limit = 2 ** (bits or 4)
    groups = (num_outputs, -(-num_inputs // group_size))
    scales = torch.exp2(torch.randint(-30, 4, groups, generator=generator).float())
    if not is_e2m1:
        scales *= 1 + torch.rand(groups, generator=generator)
    zeros = torch.randint(0, limit, groups, generator=generator, dtype=torch.uint8)
    return GroupedWeights(
        torch.randint(0, limit, shape, generator=generator, dtype=torch.uint8),
        bits or 4,
        scales,
        group_size,
        zeros if has_zeros and not is_e2m1 else None,
        order=torch.randperm(num_inputs, generator=generator).int() if is_ordered else None,
        is_e2m1=is_e2m1,
    )


def make_scaled(
    dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int] | None = None
) -> ScaledWeights:
    num_outputs, num_inputs = shape
    values = (torch.randn(shape) * 50).clamp(-127, 127).to(dtype)
    if block is None:
        return ScaledWeights(values, torch.rand(num_outputs) + 0.01)
    scales = torch.rand(-(-num_outputs // block[0]), -(-num_inputs // block[1])) + 0.01
    return ScaledWeights(values, scales, block)


def all_rows(matrix: BlockMatrix | FloatMatrix) -> Tensor:
    return matrix.rows(torch.arange(matrix.num_outputs))


def pack(weights: QuantizedWeights) -> BlockMatrix:
    matrix = pack_weights(weights)
    assert isinstance(matrix, BlockMatrix)
    return matrix


def rounded_inputs(matrix: BlockMatrix, x: Tensor) -> Tensor:
    """x as the kernel sees it, in the order of inputs."""
    if matrix.order is None:
        return blocks.round_activations(x, matrix.input_planes)
    columns = torch.where(matrix.order >= 0, x[:, matrix.order.clamp(min=0).long()], 0.0)
    seen = blocks.round_activations(columns.contiguous(), matrix.input_planes)
    is_input = matrix.order >= 0
    return torch.empty_like(x).index_copy_(1, matrix.order[is_input].long(), seen[:, is_input])


def check(weights: QuantizedWeights, num_tokens: int, exact: Tensor | None = None) -> None:
    """Compares products with inputs of 16 bits and of 8; `exact` is what the matrix holds."""
    weight = weights.dequantize() if exact is None else exact
    num_outputs, num_inputs = weight.shape
    x, bias = torch.randn(num_tokens, num_inputs), torch.randn(num_outputs)
    packed = pack(weights)
    # Numbers and zeros may cancel.
    size = weight.abs().amax(1, keepdim=True) * 16 + weight.abs()
    for planes in (1, 2):
        matrix = replace(packed, input_planes=planes)
        seen = rounded_inputs(matrix, x).double()
        expected = seen @ weight.double().t() + bias
        allowed = seen.abs() @ size.double().t() + bias.abs()
        error = ((matrix.multiply(x, bias) - expected).abs() / allowed).max().item()
        assert error < 1e-6, f"relative error {error} with {planes} planes"


@st.composite
def grouped(draw: st.DrawFn) -> tuple[GroupedWeights, int, int]:
    bits = draw(st.sampled_from((0, 2, 3, 4, 6, 8)))
    num_inputs = draw(st.one_of(st.integers(1, 300), st.sampled_from((32, 64, 256))))
    size = draw(st.sampled_from((7, 16, 32, 48, 64, 128, num_inputs)))
    shape = (draw(st.one_of(st.integers(1, 40), st.sampled_from((64, 129)))), num_inputs)
    weights = make_grouped(
        bits, shape, size, draw(st.booleans()), draw(st.booleans()), seed=num_inputs
    )
    return weights, draw(st.integers(1, 17)), draw(st.sampled_from((1, 2, 3)))


@given(grouped())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_groups(
    isa: str, num_threads: None, poisoned_memory: None, case: tuple[GroupedWeights, int, int]
) -> None:
    """Any bits, shapes, group sizes, zeros and orders; weights keep their values to the bit."""
    weights, num_tokens, threads = case
    torch.set_num_threads(threads)
    assert torch.equal(all_rows(pack(weights)), weights.dequantize())
    check(weights, num_tokens)


@pytest.mark.parametrize("block", [None, (128, 128), (48, 40)])
@pytest.mark.parametrize("num_inputs", [256, 300])
def test_int8(isa: str, num_inputs: int, block: tuple[int, int] | None) -> None:
    weights = make_scaled(torch.int8, (150, num_inputs), block)
    assert torch.equal(all_rows(pack(weights)), weights.dequantize())
    check(weights, 9)


@pytest.mark.parametrize("block", [None, (128, 128), (48, 40)])
@pytest.mark.parametrize("num_inputs", [256, 300])
def test_fp8_loses_what_it_is_said_to_lose(
    isa: str, num_inputs: int, block: tuple[int, int] | None
) -> None:
    """At most half a step of 127 in each block of 32, and 0.55 % of normal weights."""
    rounding = InputRounding(torch.float8_e4m3fn)
    weights = make_scaled(torch.float8_e4m3fn, (2200, num_inputs), block)
    weights = replace(weights, rounding=rounding)
    exact, found = weights.dequantize(), all_rows(pack(weights))
    filled = torch.nn.functional.pad(exact, (0, -num_inputs % 32)).unflatten(1, (-1, 32))
    largest = filled.abs().amax(2).repeat_interleave(32, 1)[:, :num_inputs]
    # Scales are in float16.
    assert ((found - exact).abs() <= largest * (0.5 / 127 + 2**-11)).all()
    if block is None:
        assert ((found - exact).norm() / exact.norm()).item() < 0.006
    check(weights, 9, exact=found)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_small_weights_keep_their_digits(native: None, quantization: str) -> None:
    """Scales of blocks that float16 has few digits for, or none, in some outputs or in all."""
    normal = torch.randn(2100, 96)
    for sizes in (torch.full((2100,), 1e-6), torch.logspace(-9, -1, 2100), torch.tensor([1e12])):
        weight = normal * sizes[:, None]
        weight[7] = 0
        if quantization == "fp8":
            scaled = to_fp8(weight)
            weight, matrix = scaled.dequantize(), pack(scaled)
        else:
            (matrix,) = PackInt8().pack(weight.split(1000))
        assert matrix.kind == "Grouped8" and matrix.input_planes == 1
        error = (all_rows(matrix) - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-30)
        assert error.max() < 0.01 and error.mean() < 0.0056


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_nothing_saturates(isa: str, bits: int) -> None:
    """All codes, zeros and inputs at the ends of their ranges, where sums are largest."""
    weights = make_grouped(bits, (20, 256), 128, has_zeros=True)
    limit = 2 ** (bits or 4) - 1
    ends = (7, 15) if bits == 0 else (0, limit)
    for low, high in (ends, ends[::-1]):
        codes = torch.full((20, 256), low, dtype=torch.uint8)
        codes[::2] = high
        zeros = None if bits == 0 else torch.full((20, 2), low, dtype=torch.uint8)
        matrix = pack(replace(weights, codes=codes, zeros=zeros, scales=torch.ones(20, 2)))
        signs = torch.ones(9, 256)
        signs[1, 1::2], signs[2, 2::4], signs[3] = -1, -1, -1
        expected = (3 * signs.double()) @ all_rows(matrix).double().t()
        torch.testing.assert_close(matrix.multiply(3 * signs).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_result_does_not_depend_on_the_batch(
    isa: str, num_threads: None, bits: int, is_ordered: bool
) -> None:
    torch.set_num_threads(3)
    weights = make_grouped(bits, (37, 320), 64, has_zeros=True, is_ordered=is_ordered)
    for planes in (1, 2):
        matrix = replace(pack(weights), input_planes=planes)
        x = torch.randn(29, 320)
        together = matrix.multiply(x)
        for token in (0, 7, 8, 23, 28):
            assert torch.equal(matrix.multiply(x[token : token + 1])[0], together[token])


def test_after_a_norm_and_with_gates(isa: str) -> None:
    """What one call of the layer does is what its parts do, with ordered and padded inputs too."""
    x, residual, norm = torch.randn(5, 100), torch.randn(5, 100), torch.rand(100)
    for is_ordered in (False, True):
        weights = make_grouped(4, (96, 100), 48, has_zeros=True, is_ordered=is_ordered)
        weights = replace(weights, scales=torch.full_like(weights.scales, 0.02))
        matrix = pack(weights)
        total = x + residual
        normal = torch.nn.functional.rms_norm(total, (100,), norm, 1e-5)
        gate, up = (normal.double() @ weights.dequantize().double().t()).chunk(2, dim=1)
        found, left = matrix.multiply_normal(x, residual.clone(), norm, 1e-5, gated=True)
        torch.testing.assert_close(left, total)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_scales_beyond_float16(isa: str) -> None:
    """MXFP4's powers of two reach from 2 ** -127 to 2 ** 127."""
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).repeat(3, 1)
    powers = torch.tensor([[2.0**120], [2.0**-120], [1.0]])
    weights = GroupedWeights(codes, 4, powers, 32, is_e2m1=True)
    values = torch.tensor((*E2M1, *(-one for one in E2M1))).repeat(2)
    assert torch.equal(all_rows(pack(weights)), powers * values)
    x = torch.ones(1, 32)
    x[0, 8:16] = 2.0
    expected = (x.double() @ weights.dequantize().double().t()).float()
    torch.testing.assert_close(pack(weights).multiply(x), expected, rtol=1e-4, atol=0.0)


def test_how_inputs_are_rounded(native: None) -> None:
    """To 16 bits where a checkpoint quantises weights alone, to 8 where inputs too."""
    assert pack(make_grouped(4, (8, 64), 32)).input_planes == 2
    assert pack(make_scaled(torch.int8, (8, 64))).input_planes == 2
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weights = replace(make_scaled(dtype, (8, 64)), rounding=InputRounding(dtype))
        assert pack(weights).input_planes == 1


def test_16_bits_are_enough(native: None) -> None:
    """Products are within 4e-5 of exact ones, relative to their root mean square."""
    weights = make_grouped(4, (64, 1024), 128, has_zeros=True)
    weights = replace(weights, scales=torch.rand(64, 8) + 0.5)
    x = torch.randn(32, 1024)
    exact = x.double() @ weights.dequantize().double().t()
    error = (pack(weights).multiply(x) - exact).norm() / exact.norm()
    assert error.item() < 4e-5


def test_what_integers_cannot_hold_stays_exact(native: None) -> None:
    """Minima, and FP8 whose inputs are not rounded."""
    minima = replace(make_grouped(4, (33, 64), 32), minima=torch.randn(33, 2))
    for weights in (minima, make_scaled(torch.float8_e4m3fn, (33, 64))):
        found = make_matrix(weights).rows(torch.arange(33))
        assert torch.equal(found, weights.dequantize())


@pytest.mark.parametrize(
    ("bits", "size", "per_weight"), [(4, 128, 4.3125), (3, 64, 4.5), (8, 512, 8.0625)]
)
def test_size(native: None, bits: int, size: int, per_weight: float) -> None:
    """Bits for each weight: the numbers, a float32 for each group, a byte for its zero."""
    matrix = pack(make_grouped(bits, (64, 1024), size, has_zeros=bits == 4))
    assert matrix.nbytes * 8 / (64 * 1024) == per_weight
