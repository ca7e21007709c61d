"""Normalisation in fp32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels import dispatch
from quire.layers.weights import Axis, Build, WeightedLayer, whole


class Norm(WeightedLayer, ABC):
    """Adds the residual, if any, and normalises the last dimension."""

    @abstractmethod
    def add_and_normalize(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) in x's dtype; the residual may be overwritten."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add_and_normalize(x, None)[0]

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(1.0 if name == "weight" else 0.0)


class RMSNorm(Norm):
    """x / rms(x) * weight."""

    weight: nn.Parameter

    dtype: ClassVar[torch.dtype | None] = None
    """Of the weight; None: that of the model."""

    def __init__(self, dim: int | Axis, eps: float, build: Build) -> None:
        super().__init__(build)
        self.eps = eps
        axis = whole(dim) if isinstance(dim, int) else dim
        self.add_weight("weight", (axis,), build, self.dtype)

    def add_and_normalize(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return dispatch.rms_norm(x, self.weight, self.eps, residual)


class WideRMSNorm(RMSNorm):
    """The weight multiplies in float32, before the result is rounded to the model's type."""

    dtype = torch.float32


class OffsetRMSNorm(WideRMSNorm):
    """x / rms(x) * (1 + weight), where checkpoints have the weight without the 1."""

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.zero_()

    def finish_loading(self) -> None:
        self.weight.add_(1)


class LayerNorm(Norm):
    """(x - mean) / deviation, times weight plus bias where `affine`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float, build: Build, affine: bool = True) -> None:
        super().__init__(build)
        self.dim, self.eps = dim, eps
        for name in ("weight", "bias"):
            if affine:
                self.add_weight(name, (whole(dim),), build)
            else:
                self.register_parameter(name, None)

    def add_and_normalize(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return F.layer_norm(total, (self.dim,), self.weight, self.bias, self.eps), total
