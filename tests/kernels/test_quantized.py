"""Linear layers from packed weights: the native kernel, its reference and exact arithmetic agree.

Compared with: the gguf package for formats, float64 products of the numbers that the reference
reads. A change that saturates a product, loses a tail of rows or tokens, reads a neighbour's bytes,
mixes up scales or lets the other tokens of a batch touch a result turns these red.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import linear as native_kernel
from quire.kernels.torch import linear as reference

KINDS = reference.KINDS
# Where the float16 scales of a block lie; all other bytes may have any value.
SCALE_OFFSETS = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
# Numbers of a block that are all at one end of their range: a byte to fill it with.
EXTREMES = {"Q8_0": (0x80, 0x7F), "Q4_0": (0, 0xFF), "Q4_1": (0, 0xFF), "Q4_K": (0, 0xFF)}
EXTREMES["Q6_K"] = (0, 0xFF)


def make_rows(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Tensor:
    """Rows of random bytes with scales of all sizes, zero and subnormal ones among them."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_outputs * num_inputs // elements, size), np.uint8)
    for start in SCALE_OFFSETS[kind]:
        scales = generator.normal(size=(len(blocks), 1)).astype(np.float16)
        scales[generator.random(len(blocks)) < 0.1] = 0
        scales[generator.random(len(blocks)) < 0.1] = 6e-8
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_outputs, -1))


def fill_numbers(kind: str, rows: Tensor, byte: int) -> Tensor:
    """The rows with all numbers (not scales) made of `byte`, and scales of one."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rows.clone().view(-1, size)
    first, last = {"Q4_1": (4, 20), "Q4_K": (16, 144), "Q6_K": (0, 192)}.get(kind, (2, size))
    blocks[:, first:last] = byte
    for start in SCALE_OFFSETS[kind]:
        blocks[:, start : start + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)
    return blocks.view(rows.shape)


def exact_product(x: Tensor, kind: str, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x W^T + bias in float64 from the gguf package's numbers, and the sum of the magnitudes."""
    weights = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    weight = torch.from_numpy(weights).double()
    result, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    return (result, size) if bias is None else (result + bias, size + bias.abs())


def magnitude_of(kind: str, x: Tensor, rows: Tensor) -> Tensor:
    """What the rounding errors of a sum are relative to: a minimum may cancel its numbers."""
    weight = reference.dequantize_rows(kind, rows).abs()
    if kind in ("Q4_1", "Q4_K"):
        weight = weight + weight.amax(1, keepdim=True)
    return x.abs() @ weight.t()


def check(
    kind: str, rows: Tensor, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compares the kernel with its reference, with inputs of 16 bits and of 8; returns the kernel's
    result with 8."""
    num_inputs = x.shape[1]
    for planes in (2, 1):
        packed = native_kernel.pack_blocks(kind, rows, num_inputs, planes)
        found = packed.multiply(x, bias, out)
        expected = reference.pack_blocks(kind, rows, num_inputs, planes).multiply(x, bias)
        size = magnitude_of(kind, reference.round_activations(x, planes), rows)
        if bias is not None:
            size += bias.abs()
        error = ((found - expected).abs() / size.clamp(min=1e-30)).max().item()
        assert error < 2e-6, f"relative error {error} with {planes} planes"
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    kind = draw(st.sampled_from(KINDS))
    num_blocks = draw(st.integers(1, 3) if kind.endswith("K") else st.integers(1, 9))
    num_inputs = num_blocks * (256 if kind.endswith("K") else 32)
    num_outputs = draw(st.one_of(st.integers(1, 40), st.sampled_from((64, 129))))
    num_tokens = draw(st.one_of(st.integers(1, 17), st.sampled_from((24, 40))))
    return kind, num_outputs, num_inputs, num_tokens, draw(st.sampled_from((1, 2, 3, 8)))


@given(cases(), st.booleans())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_kernel_is_its_reference(
    isa: str,
    num_threads: None,
    poisoned_memory: None,
    case: tuple[str, int, int, int, int],
    has_bias: bool,
) -> None:
    kind, num_outputs, num_inputs, num_tokens, threads = case
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    check(kind, make_rows(kind, num_outputs, num_inputs), x, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_shares_of_threads(isa: str, num_threads: None, kind: str, threads: int) -> None:
    """Enough work for every thread to get some, by rows or by tokens."""
    torch.set_num_threads(threads)
    for num_outputs, num_tokens in ((16 * 40 + 3, 9), (17, 131), (5, 300)):
        rows = make_rows(kind, num_outputs, 256)
        check(kind, rows, torch.randn(num_tokens, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_near_the_exact_product(kind: str) -> None:
    """Rounding the inputs to 8 bits, or to 16, costs what that costs, and nothing else is lost."""
    rows, x, bias = make_rows(kind, 50, 512), torch.randn(20, 512), torch.randn(50)
    exact, size = exact_product(x, kind, rows, bias)
    finer = reference.pack_blocks(kind, rows, 512, 2).multiply(x, bias)
    assert ((finer - exact).norm() / exact.norm()).item() < 1e-4
    found = reference.pack_blocks(kind, rows, 512).multiply(x, bias)
    assert ((found - exact).norm() / exact.norm()).item() < 1e-2
    rounded, _ = exact_product(reference.round_activations(x), kind, rows, bias)
    assert ((found - rounded).abs() / size).max().item() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_exact(native: None, kind: str) -> None:
    rows = make_rows(kind, 37, 768)
    ids = torch.tensor([36, 0, 15, 16, 16, 31, 35])
    expected = gguf.quants.dequantize(rows[ids].numpy(), gguf.GGMLQuantizationType[kind])
    for module in (native_kernel, reference):
        found = module.pack_blocks(kind, rows, 768).rows(ids)  # type: ignore[attr-defined]
        assert torch.equal(found, torch.from_numpy(expected))
    found = native_kernel.pack_blocks(kind, rows, 768).rows(ids.int())
    assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_saturates(isa: str, kind: str, sign: int) -> None:
    """All numbers and inputs at the ends of their ranges, where sums of products are largest."""
    rows = make_rows(kind, 20, 512)
    low, high = (fill_numbers(kind, rows, byte) for byte in EXTREMES[kind])
    mixed = low.clone()
    mixed[::2] = high[::2]
    for weights in (low, high, mixed):
        x = torch.full((9, 512), 3.0 * sign)
        x[1, 1::2] = -x[1, 1::2]
        x[2, 2::4] = -x[2, 2::4]
        check(kind, weights, x)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_inputs(isa: str, kind: str) -> None:
    """Blocks of zeros, of subnormal, tiny, small and large inputs, side by side."""
    x = torch.randn(7, 512)
    factors = (0.0, 1e-42, 1e-38, 1e-20, 1.0, 1e4, 1e9, 1.0)
    for i, factor in enumerate(factors):
        x[:, 64 * i : 64 * i + 64] *= factor
        alone = torch.zeros(3, 512)
        alone[:, 64 * i : 64 * i + 64] = torch.randn(3, 64) * factor
        check(kind, make_rows(kind, 19, 512), alone)
    check(kind, make_rows(kind, 19, 512), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_wrong_inputs_do_not_look_right(isa: str, value: float) -> None:
    """The token's results are NaN, all others' are what they were."""
    rows, x = make_rows("Q8_0", 20, 64), torch.randn(5, 64)
    expected = check("Q8_0", rows, x)
    x[2, 40] = value
    for module in (native_kernel, reference):
        found = module.pack_blocks("Q8_0", rows, 64).multiply(x)  # type: ignore[attr-defined]
        assert found[2].isnan().all()
        others = [0, 1, 3, 4]
        torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_the_batch(isa: str, num_threads: None, kind: str) -> None:
    packed = native_kernel.pack_blocks(kind, make_rows(kind, 37, 512), 512)
    x = torch.randn(29, 512)
    torch.set_num_threads(3)
    together = packed.multiply(x)
    for token in (0, 7, 8, 23, 28):
        alone = packed.multiply(x[token : token + 1])
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_and_outputs(isa: str, kind: str) -> None:
    """Columns of wider tensors; what lies beside them stays."""
    wide, target = torch.randn(11, 600), torch.full((11, 90), 7.0)
    rows = make_rows(kind, 37, 512)
    found = check(kind, rows, wide[:, 44:556], torch.randn(37), target[:, 20:57])
    assert found.data_ptr() == target[:, 20:57].data_ptr()
    assert (target[:, :20] == 7).all() and (target[:, 57:] == 7).all()


def test_no_tokens(isa: str) -> None:
    packed = native_kernel.pack_blocks("Q4_0", make_rows("Q4_0", 5, 32), 32)
    assert packed.multiply(torch.empty(0, 32)).shape == (0, 5)
    assert packed.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 32)


def test_int8_is_what_gguf_makes(native: None) -> None:
    """Halves, zeros and blocks of all sizes included."""
    weight = torch.randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    weight[3], weight[4, :32] = 0.0, torch.arange(32) * 0.5 - 8
    weight[4, 0] = 127.0
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(reference.quantize_int8(weight).data, torch.from_numpy(expected))
    packed = native_kernel.quantize_int8(weight)
    found = packed.rows(torch.arange(40))
    assert torch.equal(found, reference.dequantize_rows("Q8_0", torch.from_numpy(expected)))
    small = weight[:20].bfloat16()
    assert torch.equal(
        native_kernel.quantize_int8(small).data, native_kernel.quantize_int8(small.float()).data
    )
    assert torch.equal(
        reference.quantize_int8(small).data, reference.quantize_int8(small.float()).data
    )


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (33, 64), (2100, 96), (4128, 32)])
def test_int8_is_packed_as_blocks_are(native: None, num_outputs: int, num_inputs: int) -> None:
    """All bytes, for more rows than are worked on at a time, and for scales of every size."""
    weight = torch.randn(num_outputs, num_inputs) * torch.logspace(-12, 8, num_outputs)[:, None]
    weight[::7] = (weight[::7] / weight[::7].abs().amax() * 254).round() / 2
    expected = native_kernel.pack_blocks("Q8_0", reference.quantize_int8(weight).data, num_inputs)
    found = native_kernel.quantize_int8(weight.t().contiguous().t())
    assert torch.equal(found.data, expected.data)


def test_int8_of_wrong_weights_does_not_look_right(native: None) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = torch.ones(3, 64)
        weight[1, 40] = value
        rows = native_kernel.quantize_int8(weight).rows(torch.arange(3))
        assert not rows[1, 32:].isfinite().any()
        assert torch.equal(rows[0], rows[2]) and torch.equal(rows[1, :32], rows[0, :32])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_size(kind: str) -> None:
    rows = make_rows(kind, 160, 1536)
    packed = native_kernel.pack_blocks(kind, rows, 1536)
    assert packed.data.numel() <= 1.05 * rows.numel()


@pytest.mark.parametrize("module", [native_kernel, reference])
def test_what_cannot_be_is_refused(native: None, module: object) -> None:
    pack = module.pack_blocks  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="num_inputs=48: Q8_0 has blocks of 32"):
        pack("Q8_0", torch.zeros(2, 51, dtype=torch.uint8), 48)
    with pytest.raises(ValueError, match="num_inputs=576: Q4_K has blocks of 256"):
        pack("Q4_K", torch.zeros(2, 324, dtype=torch.uint8), 576)
    with pytest.raises(ValueError, match="num_inputs=48"):
        module.quantize_int8(torch.randn(2, 48))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="kind='Q2_K'"):
        pack("Q2_K", torch.zeros(2, 84, dtype=torch.uint8), 256)
    with pytest.raises(ValueError, match=r"uint8 \[outputs, 34\]"):
        pack("Q8_0", torch.zeros(2, 68, dtype=torch.uint8), 32)


def test_wrong_tensors_are_refused(native: None) -> None:
    packed = native_kernel.pack_blocks("Q8_0", make_rows("Q8_0", 20, 64), 64)
    for x in (torch.randn(2, 32), torch.randn(2, 64).double(), torch.randn(64, 2).t()):
        with pytest.raises(ValueError, match="x must be"):
            packed.multiply(x)
    with pytest.raises(ValueError, match="bias must be"):
        packed.multiply(torch.randn(2, 64), torch.randn(19))
    with pytest.raises(ValueError, match="out"):
        packed.multiply(torch.randn(2, 64), out=torch.empty(3, 20))
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match="from 0 to 19"):
            packed.rows(torch.tensor([0, wrong]))
