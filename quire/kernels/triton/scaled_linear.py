"""Linear layers from weights of 8 bits on a GPU: which kernel computes which batch.

- One token: a matrix-vector kernel.
- Few tokens, inputs that are not to be rounded, GPUs without products of 8-bit floats: tiles that
  widen weights in registers. Here and for one token inputs are taken as they are, also where the
  checkpoint has them rounded: reading the weights takes all the time, and it is more exact.
- More: inputs are rounded, and cuBLAS multiplies where it has the format and the sizes; else tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor

from quire.kernels.torch.quantized_weights import InputRounding, ScaledWeights
from quire.kernels.triton.activation import rounded_silu_and_mul, silu_and_mul
from quire.kernels.triton.experts import DenseExperts
from quire.kernels.triton.finish_product import finish_product
from quire.kernels.triton.gemv import MAX_FUSED_INPUTS, NormInput, gemv
from quire.kernels.triton.grouped_matrix import multiprocessors
from quire.kernels.triton.norm import rms_norm, rounded_rms_norm
from quire.kernels.triton.rounding import RoundedInput, round_inputs
from quire.kernels.triton.scaled_tile import scaled_product

MAX_EXACT_TOKENS = 1
"""Up to here inputs are taken as they are."""
CUBLAS_ALIGNMENT = 16
"""cuBLAS takes inputs and outputs in multiples of this."""
CUBLAS_BLOCK = (128, 128)
FACTOR = 2.0**16
"""By which products without their scales are divided, so that float16 holds them: the largest is
448 * 448 * inputs."""


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
        self.values = values
        self.scales = _padded(weights.scales.float()) if weights.block else weights.scales.float()
        self.block = weights.block
        self.rounding = rounding
        self._fits_cublas = values.is_cuda and _fits_cublas(weights, rounding)
        if self._fits_cublas:
            _constants(values.device)  # not while a graph is captured
        self._correction: Tensor | None = None
        if rounding is not None and rounding.zero is not None:
            # Tiles multiply what is stored, which has the zero point in it.
            assert rounding.scale is not None, "inputs with a zero point have a fixed scale"
            sums = weights.dequantize().sum(1)
            self._correction = sums * rounding.scale * -rounding.zero

    @property
    def num_outputs(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias, into `out` if given."""
        if len(x) == 1 and x.is_contiguous():
            return gemv(x, self.values, bias, None, False, out, self.scales, self.block)[0]
        rounding = self._rounding_of(len(x))
        if rounding is not None:
            return self._multiply_rounded(round_inputs(x, rounding), bias, out)
        if out is None:
            out = torch.empty((len(x), self.num_outputs), dtype=x.dtype, device=x.device)
        scaled_product(x, None, None, self.values, self.scales, self.block, bias, out)
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
        is_fused = len(x) == 1 and x.is_contiguous() and x.shape[1] <= MAX_FUSED_INPUTS
        if is_fused and not (gated and self._cuts_gates()):
            norm = NormInput(norm_weight, eps, residual)
            return gemv(x, self.values, bias, norm, gated, None, self.scales, self.block)
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
        bits = self.values.view(torch.uint8)[ids]
        kind = torch.float8_e4m3fn if self.values.dtype == torch.uint8 else self.values.dtype
        values = bits.view(kind).float()
        if self.block is None:
            return values * self.scales[ids, None]
        scales = self.scales[ids // self.block[0]].repeat_interleave(self.block[1], 1)
        return values * scales[:, : values.shape[1]]

    def _rounding_of(self, num_tokens: int) -> InputRounding | None:
        """How inputs of a batch are rounded; None: not at all."""
        return self.rounding if num_tokens > MAX_EXACT_TOKENS else None

    def _cuts_gates(self) -> bool:
        """Whether a block has rows of gates and of what they are multiplied with."""
        return self.block is not None and self.num_outputs // 2 % self.block[0] != 0

    def _multiply_rounded(self, x: RoundedInput, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self._fits_cublas and not self._suits_tiles(x.num_tokens):
            result = self._multiply_by_cublas(x, bias)
            return result if out is None else out.copy_(result)
        if out is None:
            shape = (x.num_tokens, self.num_outputs)
            out = torch.empty(shape, dtype=x.dtype, device=x.values.device)
        if self._correction is not None:
            bias = self._correction if bias is None else bias + self._correction
        size = x.group_size
        values = x.values[: x.num_tokens]
        scaled_product(values, x.scales, size, self.values, self.scales, self.block, bias, out)
        return out

    def _suits_tiles(self, num_tokens: int) -> bool:
        """Whether our tiles are quicker than those of cuBLAS, which with blocks does not divide
        inputs among processors: as measured on an H200."""
        tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(self.num_outputs, 128)
        is_small = num_tokens <= 64 or (num_tokens <= 192 and tiles <= 64)
        return self.block is not None and is_small

    def _multiply_by_cublas(self, x: RoundedInput, bias: Tensor | None) -> Tensor:
        num_tokens, weight = x.num_tokens, self.values.t()
        if self.block is not None:
            out = torch._scaled_mm(
                x.values, weight, x.scales.t(), self.scales.t(), out_dtype=x.dtype
            )
            out = out[:num_tokens]
            return out if bias is None else out.add_(bias)
        token_scales = x.scales.view(-1, 1)
        # With scales of rows torch has other types than bfloat16 on some GPUs alone.
        if x.dtype == torch.bfloat16 and _fills_tiles(
            num_tokens, self.num_outputs, multiprocessors(weight.device)
        ):
            return torch._scaled_mm(
                x.values,
                weight,
                token_scales,
                self.scales[None],
                bias=bias,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        shrink, one = _constants(weight.device)
        out = torch._scaled_mm(
            x.values, weight, shrink, one, out_dtype=x.dtype, use_fast_accum=True
        )
        finish_product(out[None], token_scales, self.scales, bias, out, FACTOR)
        return out


def stack_scaled(matrices: Sequence[Sequence[ScaledMatrix]]) -> DenseExperts | None:
    """The matrices of a layer's experts, each in parts one below the other; None where they are not
    alike. Their inputs are taken as they are."""
    first = matrices[0][0]
    parts = [part for expert in matrices for part in expert]
    if any((part.values.dtype, part.block) != (first.values.dtype, first.block) for part in parts):
        return None
    if first.block is not None and any(
        part.num_outputs % first.block[0] for expert in matrices for part in expert[:-1]
    ):
        return None
    values = torch.stack([_cat_bytes([part.values for part in one]) for one in matrices])
    scales = torch.stack([torch.cat([part.scales for part in one]) for one in matrices])
    return DenseExperts(values.view(first.values.dtype), scales, first.block)


def _cat_bytes(values: list[Tensor]) -> Tensor:
    """Some operations do not exist for floats of 8 bits."""
    return torch.cat([one.view(torch.uint8) for one in values])


def _padded(scales: Tensor) -> Tensor:
    """Scales of blocks, each row of which starts at a multiple of 16 bytes, as cuBLAS has them."""
    rows, columns = scales.shape
    wide = torch.zeros((rows, -(-columns // 4) * 4), dtype=scales.dtype, device=scales.device)
    wide[:, :columns] = scales
    return wide[:, :columns]


def _fits_cublas(weights: ScaledWeights, rounding: InputRounding | None) -> bool:
    """Whether cuBLAS has the format and takes the sizes."""
    if rounding is None or not rounding.dtype == weights.values.dtype == torch.float8_e4m3fn:
        return False
    if any(size % CUBLAS_ALIGNMENT for size in weights.shape):
        return False
    if weights.block is None:
        return rounding.group_size is None
    if (weights.block, rounding.group_size) != (CUBLAS_BLOCK, CUBLAS_BLOCK[1]):
        return False
    if weights.shape[1] % CUBLAS_BLOCK[1]:
        return False
    return torch.cuda.get_device_capability(weights.values.device) == (9, 0)


def _fills_tiles(num_tokens: int, num_outputs: int, num_processors: int) -> bool:
    """Whether cuBLAS keeps the GPU busy with a product that it scales itself: it computes tiles of
    128 x 128, each over all inputs. Without scales it also divides inputs among processors."""
    tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(num_outputs, 128)
    rounds = triton.cdiv(tiles, num_processors)
    return num_tokens * num_outputs > 0.5 * 128 * 128 * rounds * num_processors


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(1 / FACTOR, device=device), torch.tensor(1.0, device=device)


@cache
def _has_float8(device: torch.device) -> bool:
    """Whether the GPU multiplies 8-bit floats."""
    if device.type != "cuda":
        return True  # the interpreter does
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
