"""`Scheme`: the verbs of a weight format. A layer never asks which format it has."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.kernels import dispatch
from quire.layers.parallel import Axis, Placement, WeightedLayer


class NormWeight(Protocol):
    """What a scheme needs of an RMSNorm."""

    weight: torch.nn.Parameter
    eps: float


class Scheme(Protocol):
    """A weight format. One object serves all layers of a model; parameters belong to the layers."""

    def create_weights(
        self, layer: WeightedLayer, outputs: Axis, inputs: Axis, place: Placement
    ) -> None:
        """Adds to `layer` the parameters that stand for its [outputs, inputs] matrix."""

    def finish_loading(self, layer: WeightedLayer) -> None:
        """Repacks the loaded parameters into the form that `apply` reads."""

    def apply(
        self,
        layer: WeightedLayer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x W^T + bias, into `out` if given."""

    def rows(self, layer: WeightedLayer, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the matrix that `ids` name: an embedding."""

    def apply_after_norm(
        self,
        layer: WeightedLayer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: NormWeight,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`apply` of the RMSNorm of x + residual, x + residual), with silu(gate) * up of the
        first if `gated`; the residual may be overwritten."""


class Unquantized:
    """The matrix itself, in the model's dtype."""

    def create_weights(
        self, layer: WeightedLayer, outputs: Axis, inputs: Axis, place: Placement
    ) -> None:
        layer.add_weight("weight", (outputs, inputs), place)

    def finish_loading(self, layer: WeightedLayer) -> None:
        """The matrix is used as it was loaded."""

    def apply(
        self,
        layer: WeightedLayer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return dispatch.linear(x, layer.get_parameter("weight"), bias, out)

    def rows(self, layer: WeightedLayer, ids: torch.Tensor) -> torch.Tensor:
        return dispatch.embedding(ids, layer.get_parameter("weight"))

    def apply_after_norm(
        self,
        layer: WeightedLayer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: NormWeight,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = layer.get_parameter("weight")
        return dispatch.norm_linear(x, residual, norm.weight, norm.eps, weight, bias, gated)
