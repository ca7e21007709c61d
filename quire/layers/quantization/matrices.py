"""The matrix that computes fastest with quantised weights where they lie."""

from __future__ import annotations

from quire.kernels.torch.quantized_weights import QuantizedWeights, ReferenceMatrix
from quire.layers.weights import Matrix


def make_matrix(weights: QuantizedWeights) -> Matrix:
    """Packs the weights for their device; their own memory may be reused."""
    return ReferenceMatrix(weights)
