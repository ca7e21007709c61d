"""A linear layer with its norm and gates in one call: library, references and float64 agree.

A change that loses a tail of inputs, outputs or tokens, adds the residual twice when threads share
a token, or pairs a gate with another's value turns these red.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu import linear as native_kernel
from quire.kernels.cpu.linear import pack_floats
from quire.kernels.torch import linear as reference

pytestmark = pytest.mark.usefixtures("native")
EPS = 1e-5
threads_and_tokens = pytest.mark.parametrize(
    ("threads", "num_tokens"), [(1, 1), (8, 1), (2, 3), (3, 13), (4, 40)]
)


def exact(
    x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In float64: the outputs, and what the residual becomes."""
    total = x.double() if residual is None else x.double() + residual.double()
    normal = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    return F.linear(normal, weight.double(), None if bias is None else bias.double()), total


def gated(outputs: Tensor) -> Tensor:
    gate, up = outputs.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


@threads_and_tokens
@pytest.mark.parametrize("outputs", [2, 34, 64])
@pytest.mark.parametrize("has_residual", [False, True])
def test_floats_equal_exact_arithmetic(
    threads: int,
    num_tokens: int,
    outputs: int,
    has_residual: bool,
    isa: str,
    num_threads: None,
    poisoned_memory: None,
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(outputs)
    for inputs in (1, 33, 1500):
        x, norm = torch.randn(num_tokens, inputs), torch.randn(inputs)
        weight, bias = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
        residual = torch.randn(num_tokens, inputs) if has_residual else None
        matrix = pack_floats([weight])
        for gates in (False, True):
            expected, total = exact(x, residual, norm, weight, bias)
            before = None if residual is None else residual.clone()
            found, sums = matrix.multiply_normal(x, before, norm, EPS, bias, gates)
            torch.testing.assert_close(sums.double(), total, rtol=1e-6, atol=1e-6)
            wanted = gated(expected) if gates else expected
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@threads_and_tokens
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_equal_their_reference(
    threads: int, num_tokens: int, kind: str, isa: str, num_threads: None, poisoned_memory: None
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(num_tokens)
    for outputs, inputs in ((2, 32), (64, 96), (70, 64), (256, 1024)):
        rows = random_rows(kind, outputs, inputs)
        x, norm = torch.randn(num_tokens, inputs), torch.rand(inputs) + 0.5
        bias = torch.randn(outputs)
        for residual in (None, torch.randn(num_tokens, inputs)):
            for gates in (False, True):
                expected, total = reference.pack_blocks(kind, rows, inputs).multiply_normal(
                    x, residual, norm, EPS, bias, gates
                )
                matrix = native_kernel.pack_blocks(kind, rows, inputs)
                before = None if residual is None else residual.clone()
                found, sums = matrix.multiply_normal(x, before, norm, EPS, bias, gates)
                assert torch.equal(sums, total)
                # Another order of summation may move what is then rounded to 8 bits.
                error = (found - expected).norm() / expected.norm()
                assert error < 1e-3, f"relative error {error}"


def random_rows(kind: str, outputs: int, inputs: int) -> Tensor:
    """Stored rows of random numbers with scales about 0.01."""
    size = {"Q8_0": 34, "Q4_1": 20}[kind]
    blocks = torch.randint(0, 256, (outputs * inputs // 32, size), dtype=torch.uint8)
    for start in (0, 2) if kind == "Q4_1" else (0,):
        scales = torch.rand(len(blocks), 1).mul_(0.01).half()
        blocks[:, start : start + 2] = scales.view(torch.uint8)
    return blocks.view(outputs, -1)


def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    x, norm = torch.randn(40, 64), torch.randn(64)
    weight = pack_floats([torch.randn(96, 64)])
    together, _ = weight.multiply_normal(x, None, norm, EPS, None, True)
    for token in (0, 17, 39):
        alone, _ = weight.multiply_normal(x[token : token + 1], None, norm, EPS, None, True)
        assert torch.equal(alone[0], together[token])


def test_extreme_gates() -> None:
    """Gates far from zero, infinite and NaN, as torch has them."""
    gates = torch.tensor([0.0, -0.0, 88.0, -87.0, -120.0, 1e30, -1e30, torch.inf, torch.nan])
    weight = torch.cat((torch.diag(gates.nan_to_num(7.0, 7.0)), torch.eye(9)))
    x = torch.eye(9)
    x[7, 7], x[8, 8] = torch.inf, torch.nan
    matrix = pack_floats([weight])
    norm = torch.ones(9)
    found, _ = matrix.multiply_normal(x, None, norm, EPS, None, True)
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    gate, up = F.linear(normal, weight).chunk(2, dim=-1)
    torch.testing.assert_close(found, F.silu(gate) * up, equal_nan=True)


def test_refuses_what_it_would_read_wrongly() -> None:
    weight, norm = pack_floats([torch.randn(4, 8)]), torch.ones(8)
    with pytest.raises(ValueError, match="x must be float32"):
        weight.multiply_normal(torch.randn(2, 9), None, norm, EPS, None, False)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        weight.multiply_normal(torch.randn(2, 8), torch.randn(2, 16)[:, :8], norm, EPS, None, False)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        weight.multiply_normal(torch.randn(2, 8), torch.randn(3, 8), norm, EPS, None, False)
