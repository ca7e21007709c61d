"""The matrix that computes fastest with quantised weights where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels import dispatch
from quire.kernels.torch.quantized_weights import QuantizedWeights, ReferenceMatrix
from quire.layers.weights import Matrix


def make_matrix(weights: QuantizedWeights) -> Matrix:
    """Packs the weights for their device; their own memory may be reused."""
    return ReferenceMatrix(weights)


@dataclass(frozen=True)
class DenseMatrix:
    """Floats beside quantised matrices of the same layer."""

    weight: torch.Tensor

    handle = None

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        return dispatch.linear(x, self.weight, bias, out)

    def multiply_normal(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return dispatch.norm_linear(x, residual, norm_weight, eps, self.weight, bias, gated)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return dispatch.embedding(ids, self.weight)
