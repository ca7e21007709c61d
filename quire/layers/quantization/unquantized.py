"""The matrix of a layer as checkpoints hold it."""

from __future__ import annotations

import torch

from quire.kernels import dispatch
from quire.layers.weights import Axis, Build, MatrixLayer, NormWeight, ShardKey


class Unquantized:
    """The matrix itself, in the model's dtype."""

    reads_blocks = False
    adapters = None
    tokens = None

    def extra_bytes(self, layer: MatrixLayer, shard_key: ShardKey, stored: str | None) -> int:
        return 0

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        stacks = (layer.experts,) if layer.experts else ()
        layer.add_weight("weight", (*stacks, outputs, inputs), build)

    def finish_loading(self, layer: MatrixLayer) -> None:
        """The matrix is used as it was loaded."""

    def apply(
        self,
        layer: MatrixLayer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return dispatch.linear(x, layer.get_parameter("weight"), bias, out)

    def apply_expert(
        self, layer: MatrixLayer, expert: int, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        place = expert - layer.kept_experts.start
        return dispatch.linear(x, layer.get_parameter("weight")[place], bias)

    def rows(self, layer: MatrixLayer, ids: torch.Tensor) -> torch.Tensor:
        return dispatch.embedding(ids, layer.get_parameter("weight"))

    def apply_after_norm(
        self,
        layer: MatrixLayer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: NormWeight,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = layer.get_parameter("weight")
        return dispatch.norm_linear(x, residual, norm.weight, norm.eps, weight, bias, gated)
