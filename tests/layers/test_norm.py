"""Norms against float64 arithmetic, and the meaning of the residual argument."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.layers.norm import LayerNorm, RMSNorm
from tests.layers.ranks import build_for

DIM, EPS = 16, 1e-5


def rms_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def layer_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return centred / deviation * weight.double() + bias.double()


def test_rms_norm_and_residual() -> None:
    x, residual, weight = torch.randn(3, 2, DIM), torch.randn(3, 2, DIM), torch.randn(DIM)
    norm = RMSNorm(DIM, EPS, build_for())
    norm.load("weight", (), weight)
    torch.testing.assert_close(norm(x).double(), rms_reference(x, weight), rtol=1e-5, atol=1e-5)
    normed, total = norm.add_and_normalize(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))


def test_layer_norm_and_residual() -> None:
    x, residual = torch.randn(3, DIM), torch.randn(3, DIM)
    weight, bias = torch.randn(DIM), torch.randn(DIM)
    norm = LayerNorm(DIM, EPS, build_for())
    norm.load("weight", (), weight)
    norm.load("bias", (), bias)
    expected = layer_reference(x, weight, bias)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    normed, total = norm.add_and_normalize(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))


def test_layer_norm_without_weights() -> None:
    x = torch.randn(3, DIM)
    norm = LayerNorm(DIM, EPS, build_for(), affine=False)
    expected = layer_reference(x, torch.ones(DIM), torch.zeros(DIM))
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert not norm.axes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_squares_in_fp32(dtype: torch.dtype) -> None:
    """Squares of ordinary fp16 activations overflow fp16."""
    build = build_for()
    norm = RMSNorm(DIM, EPS, replace(build, dtype=dtype))
    norm.load("weight", (), torch.ones(DIM))
    y = norm(torch.full((1, DIM), 1000.0, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y, torch.ones(1, DIM, dtype=dtype))
