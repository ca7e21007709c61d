"""The matrix that computes fastest with quantised weights where they lie."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from quire.kernels import cpu, dispatch
from quire.kernels.cpu.quantized import pack_weights
from quire.kernels.expert_matrices import ExpertMatrices
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES, BlockRows, dequantize_blocks
from quire.kernels.torch.gguf_groups import GROUPED_KINDS, group_blocks
from quire.kernels.torch.quantized_weights import (
    GroupedWeights,
    QuantizedWeights,
    ReferenceMatrix,
    ScaledWeights,
)
from quire.layers.weights import Matrix

logger = logging.getLogger(__name__)


def make_matrix(
    weights: QuantizedWeights | BlockRows, dtype: torch.dtype = torch.float16
) -> Matrix:
    """Packs the weights for their device; their own memory may be reused. `dtype` is that of the
    rows of an embedding, and of blocks that no kernel computes with."""
    if isinstance(weights, BlockRows):
        if weights.kind not in GROUPED_KINDS:
            return DenseMatrix(_numbers(weights).to(dtype))
        weights = group_blocks(weights)
    if weights.scales.device.type == "cpu" and cpu.available()[0]:
        return pack_weights(weights)
    if isinstance(weights, ScaledWeights) and weights.values.is_cuda:
        from quire.kernels.triton import scaled_linear

        reason = scaled_linear.why_not(weights)
        if reason is None:
            return scaled_linear.ScaledMatrix(weights)
        _say_once(f"Weights are dequantised for each product, which is slow: {reason}.")
    if isinstance(weights, GroupedWeights) and weights.codes.is_cuda:
        from quire.kernels.triton import grouped_matrix

        if grouped_matrix.can_pack(weights):
            return grouped_matrix.pack_grouped(weights, dtype)
        _say_once(
            f"Weights are dequantised for each product, which is slow: groups of "
            f"{weights.group_size} inputs are no multiples of 16."
        )
    return ReferenceMatrix(weights)


def stack_experts(matrices: Sequence[Sequence[Matrix]]) -> ExpertMatrices | None:
    """The matrices of a layer's experts, each in parts one below the other, for the kernels of a
    GPU; None where these do not take them."""
    from quire.kernels.triton.experts import DenseExperts
    from quire.kernels.triton.grouped_experts import stack_grouped
    from quire.kernels.triton.grouped_matrix import GroupedMatrix
    from quire.kernels.triton.scaled_linear import ScaledMatrix, stack_scaled

    if all(isinstance(part, ScaledMatrix) for expert in matrices for part in expert):
        scaled = [[one for one in expert if isinstance(one, ScaledMatrix)] for expert in matrices]
        return stack_scaled(scaled)
    if all(isinstance(part, DenseMatrix) for expert in matrices for part in expert):
        dense = [
            [one.weight for one in expert if isinstance(one, DenseMatrix)] for expert in matrices
        ]
        return DenseExperts(torch.stack([torch.cat(parts) for parts in dense]))
    grouped = [expert[0] for expert in matrices if isinstance(expert[0], GroupedMatrix)]
    if len(grouped) == len(matrices) and all(len(expert) == 1 for expert in matrices):
        return stack_grouped(grouped)
    return None


def _numbers(stored: BlockRows) -> torch.Tensor:
    _, block_bytes = BLOCK_SIZES[stored.kind]
    blocks = stored.rows.reshape(-1, block_bytes)
    return dequantize_blocks(blocks, stored.kind).view(stored.shape)


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


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
