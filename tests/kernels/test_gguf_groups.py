"""GGUF blocks as grouped weights, against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.torch.gguf_blocks import BlockRows
from quire.kernels.torch.gguf_groups import GROUPED_KINDS, group_blocks
from quire.layers.quantization.matrices import DenseMatrix, make_matrix

PRODUCTS = {"Q4_K", "Q6_K"}
"""Kinds whose scales are products, which are rounded."""


def make_blocks(kind: str, scale: float = 1.0) -> tuple[BlockRows, torch.Tensor]:
    """Random rows of a kind, and their numbers."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (5 * 3, size), dtype=np.uint8)
    halves = {"Q8_0": [0], "Q4_0": [0], "Q6_K": [208], "Q5_0": [0]}.get(kind, [0, 2])
    for start in halves:
        values = (scale * generator.uniform(0.5, 1.0, len(blocks))).astype(np.float16)
        blocks[:, start : start + 2] = values[:, None].view(np.uint8)
    rows = blocks.reshape(5, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, number))
    return BlockRows(kind, torch.from_numpy(rows), 3 * elements), expected


@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("kind", sorted(GROUPED_KINDS))
def test_numbers(kind: str, scale: float) -> None:
    """Every number is kept; products are rounded no further than float16, however small."""
    stored, expected = make_blocks(kind, scale)
    weights = group_blocks(stored)
    assert weights.codes.dtype == torch.uint8 and weights.shape == tuple(expected.shape)
    assert int(weights.codes.max()) < 2**weights.bits
    found = weights.dequantize()
    if kind in PRODUCTS:
        spread = expected.abs().amax(1, keepdim=True)
        assert ((found - expected).abs() <= 2**-10 * spread).all()
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_kinds_become_numbers() -> None:
    stored, expected = make_blocks("Q5_0", 0.01)
    matrix = make_matrix(stored, torch.bfloat16)
    assert isinstance(matrix, DenseMatrix)
    torch.testing.assert_close(matrix.weight, expected.bfloat16())
