"""Matrix times vector by streams, natively."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.torch.quantized_weights import ScaledWeights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("streams", [(8, 4, 3), (8, 2, 99), (16, 3, 2)])
@pytest.mark.parametrize("kind", ["rows", "blocks", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (28672, 4096), (4096, 14336), (136, 2208), (43, 1296), (128256, 4096)]
)
def test_vectors(shape: tuple[int, int], kind: str, streams: tuple[int, int, int]) -> None:
    """Again and again: a stage that is filled too early shows now and then only."""
    from quire.kernels.hopper.vector_stream import Streams, multiply_vector
    from quire.kernels.triton.scaled_linear import ScaledMatrix

    outputs, inputs = shape
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    scales = block = None
    dtype = torch.bfloat16
    if kind in ("rows", "blocks"):
        block = (128, 128) if kind == "blocks" else None
        grid = (outputs,) if block is None else (-(-outputs // 128), -(-inputs // 128))
        quantized = ScaledWeights(
            (weight * 30).clamp(-400, 400).to(torch.float8_e4m3fn),
            torch.rand(grid, device="cuda") / 30,
            block,
        )
        exact, matrix = quantized.dequantize().double(), ScaledMatrix(quantized)
        weight, scales = matrix.values, matrix.scales
    else:
        dtype = getattr(torch, kind)
        weight = weight.to(dtype)
        exact = weight.double()
    bias = torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(1, inputs, device="cuda").to(dtype)
    expected = F.linear(x.double(), exact, bias.double())
    found = []
    for _ in range(50):
        out = torch.full_like(expected, torch.nan, dtype=dtype)
        multiply_vector(x, weight, bias, out, scales, block, Streams(*streams))
        found.append(out)
    error = (found[0].double() - expected).norm() / expected.norm()
    assert error < 3e-3, f"differs by {error:.1e}"
    assert all(torch.equal(one, found[0]) for one in found)
