"""Quantised matrices between the files that hold them and the kernels that read them.

Readers of checkpoint formats make `GroupedWeights` and `ScaledWeights`; kernels pack these for
their device. What they mean is written here; `ReferenceMatrix` computes with them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.torch.gguf_blocks import E2M1
from quire.kernels.torch.linear import PackedMatrix

SMALLEST_INPUT = 1e-10
"""Largest magnitudes of inputs below this are taken for it, so that scales are never 0."""


@dataclass(frozen=True)
class GroupedWeights:
    """Codes of a few bits, with a scale for each group of inputs of an output:
    (code - zero) * scale, or code * scale + minimum."""

    codes: Tensor
    """uint8 [outputs, inputs], each below 2 ** bits."""
    bits: int
    scales: Tensor
    """Floats [outputs, groups]."""
    group_size: int
    """Inputs of a group, in the order of `codes`; the last group may have fewer."""
    zeros: Tensor | None = None
    """uint8 [outputs, groups]; None: 2 ** (bits - 1)."""
    minima: Tensor | None = None
    """Floats [outputs, groups], instead of zeros."""
    order: Tensor | None = None
    """int32 [inputs]: column j of `codes` belongs to input order[j]. None: j."""
    is_e2m1: bool = False
    """Codes are floats of 4 bits; there are no zeros."""

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.codes.shape
        return num_outputs, num_inputs

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[outputs, inputs] in the order of inputs."""
        scales = self._by_input(self.scales.float())
        if self.is_e2m1:
            values = torch.tensor((*E2M1, *(-one for one in E2M1)), device=self.codes.device)
            weight = values[self.codes.long()] * scales
        elif self.minima is not None:
            weight = self.codes * scales + self._by_input(self.minima.float())
        else:
            zeros = 2 ** (self.bits - 1) if self.zeros is None else self._by_input(self.zeros)
            weight = (self.codes.float() - zeros) * scales
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)

    def _by_input(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


@dataclass(frozen=True)
class InputRounding:
    """How the inputs of a layer are rounded before they are multiplied."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    scale: Tensor | None = None
    """float32 [], as calibrated; None: from the largest input of each token, or of its groups."""
    zero: Tensor | None = None
    """int32 [], of int8 with a `scale`; None: 0."""
    group_size: int | None = None
    """Inputs that share a scale; None: all of a token."""

    @property
    def largest(self) -> float:
        """What the largest input becomes where scales follow the inputs."""
        return 448.0 if self.dtype == torch.float8_e4m3fn else 127.0

    def round(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] as the product sees it, in float32."""
        largest = self.largest
        size = self.group_size or x.shape[1]
        groups = F.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
        scale = self.scale
        if scale is None:
            scale = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_INPUT) / largest
        scaled = groups / scale
        if self.dtype == torch.float8_e4m3fn:
            rounded = scaled.clamp(-largest, largest).to(self.dtype).float()
        else:
            zero = 0 if self.zero is None else self.zero
            rounded = (scaled.round() + zero).clamp(-128, 127) - zero
        return (rounded * scale).flatten(1)[:, : x.shape[1]]


@dataclass(frozen=True)
class ScaledWeights:
    """Numbers of 8 bits, with a scale for each output or each block of the matrix."""

    values: Tensor
    """float8_e4m3fn or int8 [outputs, inputs]."""
    scales: Tensor
    """float32 [outputs], or [blocks of outputs, blocks of inputs]."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block; those at the edges may have fewer."""
    rounding: InputRounding | None = None
    """None: inputs are multiplied as they are."""

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.values.shape
        return num_outputs, num_inputs

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[outputs, inputs]."""
        if self.block is None:
            return (self.values.float() * self.scales[:, None]).to(dtype)
        num_outputs, num_inputs = self.shape
        by_output = self.scales.repeat_interleave(self.block[0], 0)[:num_outputs]
        scales = by_output.repeat_interleave(self.block[1], 1)[:, :num_inputs]
        return (self.values.float() * scales).to(dtype)


QuantizedWeights = GroupedWeights | ScaledWeights


@dataclass(frozen=True)
class ReferenceMatrix(PackedMatrix):
    """A quantised matrix that is dequantised for each product."""

    weights: QuantizedWeights

    @property
    def num_outputs(self) -> int:
        return self.weights.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (one for one in vars(self.weights).values() if isinstance(one, Tensor))
        return sum(tensor.nbytes for tensor in tensors)

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        rounding = getattr(self.weights, "rounding", None)
        seen = x.float() if rounding is None else rounding.round(x)
        result = F.linear(seen, self.weights.dequantize()).to(x.dtype)
        if bias is not None:
            result += bias
        return result if out is None else out.copy_(result)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weights.dequantize()[ids]
