"""Linear layers from weights of 8 bits: on the GPU, or by Triton's interpreter.

Expected values come from `ScaledWeights.dequantize` and `InputRounding.round`, which say what the
numbers mean, and plain torch. A kernel that loses an edge of a tile, takes the scale of another
block, token or gate, or rounds an input differently turns these red.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.torch.quantized_weights import InputRounding, ScaledWeights  # noqa: E402
from quire.kernels.triton import gemv, scaled_linear, scaled_tile  # noqa: E402
from quire.kernels.triton.activation import rounded_silu_and_mul  # noqa: E402
from quire.kernels.triton.norm import rounded_rms_norm  # noqa: E402
from quire.kernels.triton.rounding import RoundedInput, round_inputs  # noqa: E402
from quire.kernels.triton.scaled_linear import ScaledMatrix, why_not  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16.
HALVES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)
ROUNDING_ERROR = {torch.bfloat16: 4e-3, torch.float16: 3e-3}
"""Of results in these types and of sums on the way to them, in norm."""
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
FORMAT_ERROR = {FLOAT8: 4e-2, INT8: 2e-2}
"""Of random inputs that are rounded with a scale of their own: 3 bits of mantissa leave 2.6 %, and
steps of 1/127 of the largest input 0.8 % of those that are some 3 deviations wide."""
EPS = 1e-5

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


@dataclass(frozen=True)
class Format:
    """A way in which weights and inputs are stored."""

    dtype: torch.dtype
    block: tuple[int, int] | None = None
    group_size: int | None = None
    scale: float | None = None
    zero: int | None = None
    rounds: bool = True

    def rounding(self) -> InputRounding | None:
        if not self.rounds:
            return None
        scale = None if self.scale is None else torch.tensor(self.scale, device=DEVICE)
        zero = None if self.zero is None else torch.tensor(self.zero, device=DEVICE)
        return InputRounding(self.dtype, scale, zero, self.group_size)

    def weights(self, num_outputs: int, num_inputs: int) -> ScaledWeights:
        """Random ones, of about 1 / sqrt(inputs)."""
        shape: tuple[int, ...] = (num_outputs,)
        if self.block is not None:
            shape = (-(-num_outputs // self.block[0]), -(-num_inputs // self.block[1]))
        scales = torch.rand(shape, device=DEVICE).add(0.5) / num_inputs**0.5
        values = torch.randn(num_outputs, num_inputs, device=DEVICE)
        if self.dtype == INT8:
            values, scales = values.mul(40).round().clamp(-127, 127), scales / 40
        return ScaledWeights(values.to(self.dtype), scales, self.block, self.rounding())


FORMATS = {
    "fp8": Format(FLOAT8),
    "fp8 static": Format(FLOAT8, scale=0.01),
    "fp8 blocks": Format(FLOAT8, (128, 128), 128),
    "fp8 small blocks": Format(FLOAT8, (32, 64), 32),
    "fp8 groups": Format(FLOAT8, group_size=64),
    "fp8 weights": Format(FLOAT8, rounds=False),
    "int8": Format(INT8),
    "int8 zero": Format(INT8, scale=0.03, zero=-9),
    "int8 blocks zero": Format(INT8, (64, 32), scale=0.03, zero=17),
    "int8 weights": Format(INT8, (64, 128), rounds=False),
}
formats = pytest.mark.parametrize("name", FORMATS)
# Sizes that no tile, no block and no vector of 16 divides, and those of real layers.
SHAPES = [(33, 40), (66, 72), (160, 144)] + ON_GPU * [(576, 7168), (28672, 4096), (4096, 14336)]
TOKENS = (1, 5, 21) + ON_GPU * (16, 17, 64, 250, 1000)
PAIRS = [
    (name, shape)
    for i, name in enumerate(FORMATS)
    for shape in (SHAPES if ON_GPU else [SHAPES[i % 2], SHAPES[2]][: 1 + (i == 2)])
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for each."""
    if not ON_GPU:
        monkeypatch.setattr(scaled_tile, "STEPS_WORTHWHILE", 1)
        monkeypatch.setattr(gemv, "_tile8", lambda *_: gemv.Tile(32, 128, 1))


def random(*shape: int, dtype: torch.dtype = HALVES[0]) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(found: Tensor, expected: Tensor, bound: float = 0.0) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= max(bound, ROUNDING_ERROR[found.dtype]), f"relative error {error:.1e}"


def product(weights: ScaledWeights, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the format says, with inputs that are rounded only where the matrix does."""
    rounding = weights.rounding if len(x) > scaled_linear.MAX_EXACT_TOKENS else None
    seen = x.float() if rounding is None else rounding.round(x)
    return F.linear(seen, weights.dequantize(), None if bias is None else bias.float())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded where the kernels and the model do."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (normal.to(x.dtype) * weight).to(x.dtype)


@pytest.mark.parametrize(("name", "shape"), PAIRS, ids=str)
def test_product(name: str, shape: tuple[int, int]) -> None:
    """Every path of `multiply`; into a given place with a bias, and into a new one."""
    torch.manual_seed(sum(shape))
    weights = FORMATS[name].weights(*shape)
    matrix = ScaledMatrix(weights)
    assert matrix.num_outputs == shape[0] and matrix.nbytes >= weights.values.nbytes
    for i, num_tokens in enumerate(TOKENS):
        dtype = HALVES[i % len(HALVES)]
        x, bias = random(num_tokens, shape[1], dtype=dtype), random(shape[0], dtype=dtype)
        wide = torch.full((num_tokens, shape[0] + 16), torch.nan, dtype=dtype, device=DEVICE)
        out = wide[:, 8:-8]
        assert matrix.multiply(x, bias, out) is out
        check(out, product(weights, x, bias))
        assert wide[:, :8].isnan().all() and wide[:, -8:].isnan().all()
        if ON_GPU or num_tokens == 5:
            check(matrix.multiply(x), product(weights, x))


@pytest.mark.parametrize(("name", "shape"), PAIRS, ids=str)
def test_product_after_norm_and_gates(name: str, shape: tuple[int, int]) -> None:
    """Residual, norm, layer and gates; a block may have the last gate and what others go to."""
    torch.manual_seed(sum(shape))
    num_outputs, num_inputs = shape[0] + shape[0] % 2, shape[1]
    weights = FORMATS[name].weights(num_outputs, num_inputs)
    matrix = ScaledMatrix(weights)
    norm_weight, bias = random(num_inputs), random(num_outputs)
    for i, num_tokens in enumerate(TOKENS):
        gated, has_residual = (i + len(name)) % 2 == 0, (i + shape[1]) % 3 != 0
        x, residual = random(num_tokens, num_inputs), random(num_tokens, num_inputs)
        total = x + residual if has_residual else x
        found, summed = matrix.multiply_normal(
            x, residual if has_residual else None, norm_weight, EPS, bias, gated
        )
        assert torch.equal(summed, total)
        expected = product(weights, norm(total, norm_weight), bias)
        if gated:
            expected = gates(expected)
        check(found, expected, 2 * ROUNDING_ERROR[x.dtype])
        if matrix.takes_gates(num_tokens):
            gate_up = random(num_tokens, 2 * num_inputs)
            expected = product(weights, gates(gate_up), bias)
            check(matrix.multiply_gates(gate_up, bias), expected, 2 * ROUNDING_ERROR[x.dtype])


def gates(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).to(gate.dtype) * up


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].rounds])
@pytest.mark.parametrize("num_inputs", [200] + ON_GPU * [40, 14336])
def test_inputs_are_rounded_as_specified(name: str, num_inputs: int) -> None:
    """By the kernel that only rounds, after a norm, and behind gates."""
    rounding = FORMATS[name].rounding()
    assert rounding is not None
    for dtype in HALVES:
        x, other = random(3, num_inputs, dtype=dtype), random(3, num_inputs, dtype=dtype)
        x[1] = 0  # has a scale nevertheless
        weight = random(num_inputs, dtype=dtype)
        close_to(round_inputs(x, rounding), x, rounding)
        residual = other.clone()
        normal = rounded_rms_norm(x, weight, EPS, residual, rounding)
        assert torch.equal(residual, x + other)
        close_to(normal, norm(x + other, weight), rounding)
        gated = rounded_silu_and_mul(torch.cat((x, other), 1), rounding)
        close_to(gated, gates(torch.cat((x, other), 1)), rounding)


def close_to(found: RoundedInput, x: Tensor, rounding: InputRounding) -> None:
    """Equal but for inputs halfway between two numbers, which another order of summation moves."""
    num_inputs = x.shape[1]
    assert found.num_tokens == len(x)
    scales = found.scales.t()[: len(x)].repeat_interleave(rounding.group_size or num_inputs, 1)
    values = found.values[: len(x)].float()
    if rounding.zero is not None:
        values -= rounding.zero
    expected = rounding.round(x)
    differ = (values * scales[:, :num_inputs] - expected).abs() > 1e-5 * expected.abs()
    assert differ.float().mean() < 0.01


@formats
def test_rounding_keeps_to_the_error_of_the_format(name: str) -> None:
    """Against the inputs as they are, in float64."""
    weights, x = FORMATS[name].weights(48, 128), random(17, 128)
    exact = F.linear(x.double(), weights.dequantize().double())
    bound = FORMAT_ERROR[weights.values.dtype] if FORMATS[name].rounds else 0.0
    check(ScaledMatrix(weights).multiply(x), exact, bound)


@formats
def test_rows(name: str) -> None:
    weights = FORMATS[name].weights(70, 200)
    ids = torch.tensor([69, 0, 33, 0], device=DEVICE)
    assert torch.equal(ScaledMatrix(weights).rows(ids), weights.dequantize()[ids])


def test_gpus_without_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of 8-bit floats are read from their bits."""
    weights = ScaledWeights(
        torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FLOAT8).view(2, 128),
        torch.tensor([0.5, 2.0], device=DEVICE),
        rounding=InputRounding(FLOAT8),
    )
    weights.values.view(torch.uint8)[:, 127] = 0  # not a number
    monkeypatch.setattr(scaled_linear, "_has_float8", lambda device: False)
    matrix = ScaledMatrix(weights)
    for num_tokens in (1, 20):
        x = random(num_tokens, 128)
        check(matrix.multiply(x), F.linear(x.float(), weights.dequantize()))
    assert torch.equal(matrix.rows(torch.tensor([1])), weights.dequantize()[1:])


def test_formats_without_a_kernel_are_named() -> None:
    assert why_not(FORMATS["fp8 blocks"].weights(128, 128)) is None
    odd = Format(FLOAT8, (128, 96)).weights(128, 192)
    assert "[128, 96] are not powers of two" in (why_not(odd) or "")
