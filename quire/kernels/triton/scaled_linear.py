"""Linear layers from weights of 8 bits on a GPU: which kernel computes which batch.

- One token: a matrix-vector kernel.
- Few tokens, inputs that are not to be rounded, GPUs without products of 8-bit floats: tiles that
  widen weights in registers. Here and for one token inputs are taken as they are, also where the
  checkpoint has them rounded: reading the weights takes all the time, and it is more exact.
- More: inputs are rounded, and cuBLAS multiplies where it has the format and the sizes; else tiles.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from quire.kernels.torch.quantized_weights import InputRounding, ScaledWeights
from quire.kernels.triton.activation import rounded_silu_and_mul, silu_and_mul
from quire.kernels.triton.gemv import MAX_FUSED_INPUTS, NormInput, gemv
from quire.kernels.triton.norm import rms_norm, rounded_rms_norm
from quire.kernels.triton.rounding import RoundedInput, round_inputs
from quire.kernels.triton.scaled_tile import scaled_product

MAX_EXACT_TOKENS = 16
"""Up to here the inputs of a batch are taken as they are."""
CUBLAS_ALIGNMENT = 16
"""cuBLAS takes inputs and outputs in multiples of this."""
CUBLAS_BLOCK = (128, 128)


def why_not(weights: ScaledWeights) -> str | None:
    """Why these kernels cannot compute with the weights; None if they can."""
    sizes = [] if weights.block is None else list(weights.block)
    if weights.rounding is not None and weights.rounding.group_size is not None:
        sizes.append(weights.rounding.group_size)
    if any(size < 32 or size != triton.next_power_of_2(size) for size in sizes):
        return f"blocks and groups of {sizes} are not powers of two from 32 on"
    return None


class ScaledMatrix:
    """`ScaledWeights` on a GPU."""

    handle = None
    """The native library knows nothing of it."""

    def __init__(self, weights: ScaledWeights) -> None:
        values, rounding = weights.values.contiguous(), weights.rounding
        if not _has_float8(values.device):
            # Triton does not know the type on such a GPU.
            if values.dtype == torch.float8_e4m3fn:
                values = values.view(torch.uint8)
            if rounding is not None and rounding.dtype == torch.float8_e4m3fn:
                rounding = None
        self._values = values
        self._scales = _padded(weights.scales.float()) if weights.block else weights.scales.float()
        self._block = weights.block
        self._rounding = rounding
        self._correction: Tensor | None = None
        if rounding is not None and rounding.zero is not None:
            # Tiles multiply what is stored, which has the zero point in it.
            assert rounding.scale is not None, "inputs with a zero point have a fixed scale"
            sums = weights.dequantize().sum(1)
            self._correction = sums * rounding.scale * -rounding.zero

    @property
    def num_outputs(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias, into `out` if given."""
        if len(x) == 1 and x.is_contiguous():
            return gemv(x, self._values, bias, None, False, out, self._scales, self._block)[0]
        rounding = self._rounding_of(len(x))
        if rounding is not None:
            return self._multiply_rounded(round_inputs(x, rounding), bias, out)
        if out is None:
            out = torch.empty((len(x), self.num_outputs), dtype=x.dtype, device=x.device)
        scaled_product(x, None, None, self._values, self._scales, self._block, bias, out)
        return out

    def multiply_normal(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(`multiply` of norm(x + residual), x + residual), with silu(gate) * up of the first if
        `gated`; the residual may be overwritten."""
        total = x if residual is None else residual
        rounding = self._rounding_of(len(x))
        if rounding is not None:
            rounded = rounded_rms_norm(x, norm_weight, eps, residual, rounding)
            out = self._multiply_rounded(rounded, bias, None)
            return silu_and_mul(out) if gated else out, total
        if len(x) == 1 and x.is_contiguous() and not (gated and self._cuts_gates()):
            norm = None
            if x.shape[1] <= MAX_FUSED_INPUTS:
                norm = NormInput(norm_weight, eps, residual)
            else:
                x = rms_norm(x, norm_weight, eps, residual)
            out, summed = gemv(x, self._values, bias, norm, gated, None, self._scales, self._block)
            return out, summed if norm is not None else total
        out = self.multiply(rms_norm(x, norm_weight, eps, residual), bias)
        return silu_and_mul(out) if gated else out, total

    def takes_gates(self, num_tokens: int) -> bool:
        """Whether gates are applied and the result rounded at once."""
        return self._rounding_of(num_tokens) is not None

    def multiply_gates(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """`multiply` of silu(gate) * up, for a number of tokens that it takes gates of."""
        rounding = self._rounding_of(len(gate_up))
        assert rounding is not None
        return self._multiply_rounded(rounded_silu_and_mul(gate_up, rounding), bias, None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight in float32, for an embedding."""
        bits = self._values.view(torch.uint8)[ids]
        kind = torch.float8_e4m3fn if self._values.dtype == torch.uint8 else self._values.dtype
        values = bits.view(kind).float()
        if self._block is None:
            return values * self._scales[ids, None]
        scales = self._scales[ids // self._block[0]].repeat_interleave(self._block[1], 1)
        return values * scales[:, : values.shape[1]]

    def _rounding_of(self, num_tokens: int) -> InputRounding | None:
        """How inputs of a batch are rounded; None: not at all."""
        return self._rounding if num_tokens > MAX_EXACT_TOKENS else None

    def _cuts_gates(self) -> bool:
        """Whether a block has rows of gates and of what they are multiplied with."""
        return self._block is not None and self.num_outputs // 2 % self._block[0] != 0

    def _suits_cublas(self, x: RoundedInput) -> bool:
        return False

    def _multiply_by_cublas(self, x: RoundedInput, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _multiply_rounded(self, x: RoundedInput, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self._suits_cublas(x) and out is None:
            return self._multiply_by_cublas(x, bias)
        if out is None:
            shape = (len(x.values), self.num_outputs)
            out = torch.empty(shape, dtype=x.dtype, device=x.values.device)
        if self._correction is not None:
            bias = self._correction if bias is None else bias + self._correction
        group_size = self._rounding.group_size
        scaled_product(
            x.values, x.scales, group_size, self._values, self._scales, self._block, bias, out
        )
        return out


def _padded(scales: Tensor) -> Tensor:
    """Scales of blocks, each row of which starts at a multiple of 16 bytes, as cuBLAS has them."""
    rows, columns = scales.shape
    wide = torch.zeros((rows, -(-columns // 4) * 4), dtype=scales.dtype, device=scales.device)
    wide[:, :columns] = scales
    return wide[:, :columns]


@cache
def _has_float8(device: torch.device) -> bool:
    """Whether the GPU multiplies 8-bit floats."""
    if device.type != "cuda":
        return True  # the interpreter does
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
