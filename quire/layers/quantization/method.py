"""`QuantizationMethod`: the verbs of a weight format. A layer never asks which format it has."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.kernels import dispatch
from quire.layers.weights import Axis, Build, MatrixLayer


class NormWeight(Protocol):
    """What a method needs of an RMSNorm."""

    weight: torch.nn.Parameter
    eps: float


class QuantizationMethod(Protocol):
    """A weight format. One object serves any number of layers; parameters belong to the layers."""

    @property
    def reads_blocks(self) -> bool:
        """Whether weights are to be loaded as blocks, where a file stores them so."""
        ...

    def extra_bytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        """Memory of a checkpoint's matrix beside the parameters of its layer. `stored` is its kind
        of blocks in the file, if `reads_blocks`."""
        ...

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        """Adds to `layer` the parameters that stand for its [outputs, inputs] matrix."""

    def finish_loading(self, layer: MatrixLayer) -> None:
        """Repacks the loaded parameters into the form that `apply` reads."""

    def apply(
        self,
        layer: MatrixLayer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x W^T + bias, into `out` if given."""

    def rows(self, layer: MatrixLayer, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the matrix that `ids` name: an embedding."""

    def apply_after_norm(
        self,
        layer: MatrixLayer,
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

    reads_blocks = False

    def extra_bytes(self, num_outputs: int, num_inputs: int, stored: str | None) -> int:
        return 0

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        layer.add_weight("weight", (outputs, inputs), build)

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
