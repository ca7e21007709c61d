"""Products with grouped weights as a Hopper GPU compiles them: against the weights' own meaning.

Tensor cores that read registers, loads that run ahead and programs that add up each other's sums
exist only natively; the interpreter's tests cannot see a fault in them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.torch.quantized_weights import GroupedWeights

pytestmark = pytest.mark.gpu

DTYPES = {torch.float16: 2e-3, torch.bfloat16: 8e-3}
OFFSETS = (None, "zeros", "minima")


def make_weights(outputs: int, inputs: int, group_size: int, offset: str | None) -> GroupedWeights:
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(outputs, groups, device="cuda") + 0.5).div(16).half()
    zeros = minima = None
    if offset == "zeros":
        zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8, device="cuda")
    elif offset == "minima":
        minima = -torch.rand(outputs, groups, device="cuda").half()
    return GroupedWeights(codes, 4, scales, group_size, zeros, minima)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < DTYPES[found.dtype], f"differs by {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"),
    [(6144, 4096, 128), (200, 4096, 64), (4096, 14336, 128), (70, 1000, 32), (136, 2048, 2048)],
)
def test_products(
    outputs: int, inputs: int, group_size: int, offset: str | None, dtype: torch.dtype
) -> None:
    """Batches of all kernels, of real sizes and of odd ones; twice, as counts must be reset."""
    from quire.kernels.triton.grouped_matrix import pack_grouped

    weights = make_weights(outputs, inputs, group_size, offset)
    matrix, exact = pack_grouped(weights, dtype), weights.dequantize().double()
    bias = torch.randn(outputs, device="cuda").to(dtype)
    for tokens in (1, 7, 16, 17, 33, 65, 129, 200, 256, 300, 512, 600, 1100):
        x = torch.randn(tokens, inputs, device="cuda").to(dtype)
        out = torch.full((tokens, outputs + 8), torch.nan, dtype=dtype, device="cuda")
        expected = F.linear(x.double(), exact, bias.double())
        for _ in range(2):
            out.fill_(torch.nan)
            matrix.multiply(x, bias, out[:, :outputs])
            close(out[:, :outputs], expected)
            assert out[:, outputs:].isnan().all()


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
def test_gate_after_norm(tokens: int, offset: str | None) -> None:
    """Residual, norm, linear layer and gate equal the four one after another."""
    from quire.kernels.triton.grouped_matrix import pack_grouped

    weights = make_weights(300, 1024, 128, offset)
    matrix = pack_grouped(weights, torch.float16)
    x, residual = torch.randn(2, tokens, 1024, device="cuda").half()
    norm = torch.rand(1024, device="cuda").half()
    total = x + residual
    normal = F.rms_norm(total.float(), (1024,), norm.float(), 1e-5).half()
    gate, up = F.linear(normal.double(), weights.dequantize().double()).chunk(2, -1)
    found, found_total = matrix.multiply_normal(x, residual, norm, 1e-5, None, True)
    close(found, F.silu(gate) * up)
    assert torch.equal(found_total, total)


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [(None, torch.float16), ("zeros", torch.bfloat16), ("minima", torch.float16)],
)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size", "tile"),
    [
        (28672, 4096, 128, (4, 3, 3)),
        (6144, 4096, 128, (4, 2, 99)),
        (4096, 14336, 128, (4, 3, 4, 128)),
        (200, 4096, 64, (8, 2, 2, 128)),
        (136, 2048, 2048, (2, 4, 6)),
        (56, 1480, 64, (4, 4, 3)),
    ],
)
def test_streams(
    outputs: int,
    inputs: int,
    group_size: int,
    tile: tuple[int, ...],
    offset: str | None,
    dtype: torch.dtype,
) -> None:
    """Weights that come through shared memory, with gates and without, again and again: a stage
    that is filled too early shows now and then only."""
    from quire.kernels.triton.grouped_matrix import StreamTile, pack_grouped

    weights = make_weights(outputs, inputs, group_size, offset)
    matrix, exact = pack_grouped(weights, dtype), weights.dequantize().double()
    bias = torch.randn(outputs, device="cuda").to(dtype)
    for tokens, gated in ((1, False), (1, True), (5, False)):
        x = torch.randn(tokens, inputs, device="cuda").to(dtype)
        expected = F.linear(x.double(), exact, bias.double())
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        found = []
        for _ in range(50):
            out = torch.full_like(expected, torch.nan, dtype=dtype)
            matrix.multiply_streamed(x, bias, out, StreamTile(*tile), gated)
            found.append(out)
        close(found[0], expected)
        assert all(torch.equal(one, found[0]) for one in found)
