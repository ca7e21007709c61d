"""References for linear layers and embeddings from packed weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.torch.gguf_blocks import BLOCK_SIZES, CHUNK_ELEMENTS, dequantize_blocks
from quire.kernels.torch.qkv import rms_norm

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""GGUF's names of the block formats."""

ACTIVATION_BLOCK = 32
# Of inputs in one plane, and in two.
LARGEST_INPUTS = (127.0, 127.0 * 257)
# Activations below this are taken for zeros: the inverse of their scale would overflow.
SMALLEST_ACTIVATION = 1e-30
# Rows of weights that are dequantised at a time, to bound the memory for them.
ROWS_AT_ONCE = 4096


class PackedMatrix(ABC):
    """Weights [num_outputs, num_inputs]."""

    handle = None
    """The native library knows nothing of it."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [tokens, inputs] in float32, into `out` if given."""

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
        total = x if residual is None else x + residual
        out = self.multiply(rms_norm(total, norm_weight, eps), bias)
        if not gated:
            return out, total
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up, total


@dataclass(frozen=True)
class FloatMatrix(PackedMatrix):
    """Weights [num_outputs, num_inputs] in float32."""

    weight: Tensor

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        result = F.linear(x, self.weight, bias)
        return result if out is None else out.copy_(result)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that `ids` [n] name, [n, inputs]."""
        return F.embedding(ids, self.weight)


@dataclass(frozen=True)
class BlockMatrix(PackedMatrix):
    """Quantised weights [num_outputs, num_inputs]."""

    kind: str
    num_outputs: int
    num_inputs: int
    data: Tensor
    """uint8 [num_outputs, bytes], as in a GGUF file."""
    input_planes: int = 1
    """Bytes for each input that is multiplied with it: 1 for 8 bits, 2 for 16."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [tokens, inputs] in float32, which is rounded first, to as many bits
        as the matrix has planes for.

        A token with an infinity or NaN gets NaN for all outputs.
        """
        rounded = round_activations(x, self.input_planes)
        outputs = [
            F.linear(rounded, dequantize_rows(self.kind, rows))
            for rows in self.data.split(ROWS_AT_ONCE)
        ]
        result = torch.cat(outputs, dim=1)
        if bias is not None:
            result += bias
        return result if out is None else out.copy_(result)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that `ids` [n] name, exactly, in float32 [n, inputs]."""
        return dequantize_rows(self.kind, self.data[ids])


def pack_floats(
    shards: Sequence[Tensor], empty: object = None, dtype: object = None
) -> FloatMatrix:
    """A matrix of shards [outputs, inputs] one below the other; torch finds the memory."""
    return FloatMatrix(torch.cat(list(shards)).float())


def float_bytes(num_outputs: int, num_inputs: int) -> int:
    """What a matrix takes in float32."""
    return num_outputs * num_inputs * torch.float32.itemsize


def pack_blocks(kind: str, rows: Tensor, num_inputs: int, input_planes: int = 1) -> BlockMatrix:
    """The matrix whose rows [outputs, bytes] are stored in blocks of this kind."""
    check_rows(kind, rows, num_inputs)
    return BlockMatrix(kind, len(rows), num_inputs, rows.contiguous(), input_planes)


def packed_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    """What a matrix takes in blocks of this kind."""
    check_inputs(kind, num_inputs)
    block_elements, block_bytes = BLOCK_SIZES[kind]
    return num_outputs * (num_inputs // block_elements) * block_bytes


def quantize_int8(weight: Tensor) -> BlockMatrix:
    """Weights [outputs, inputs] of any floating type in 8 bits."""
    return pack_blocks("Q8_0", int8_rows(weight), weight.shape[1])


def dequantize_rows(kind: str, rows: Tensor) -> Tensor:
    """Stored rows [n, bytes] -> float32 [n, inputs]."""
    _, block_bytes = BLOCK_SIZES[kind]
    return dequantize_blocks(rows.reshape(-1, block_bytes), kind).view(len(rows), -1)


def round_activations(x: Tensor, planes: int = 1) -> Tensor:
    """x as the kernel sees it: integers with a scale for every 32 inputs, here multiplied out."""
    limit = LARGEST_INPUTS[planes - 1]
    blocks = x.reshape(x.shape[0], -1, ACTIVATION_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    nothing = largest < SMALLEST_ACTIVATION
    scale = torch.where(nothing, 0.0, largest / limit)
    # A number divided by a tensor would be the product with its reciprocal, another rounding.
    inverse = torch.where(nothing, 0.0, torch.tensor(limit) / largest)
    numbers = (blocks * inverse).round()
    if planes == 2:  # the lower byte has no -128
        numbers += numbers.remainder(256) == 128
    return torch.where(largest.isfinite(), numbers * scale, torch.nan).view(x.shape)


def int8_rows(weight: Tensor) -> Tensor:
    """Weights [outputs, inputs] as rows of Q8_0 blocks: float16 max / 127, then 32 int8."""
    check_inputs("Q8_0", weight.shape[1])
    elements, block_bytes = BLOCK_SIZES["Q8_0"]
    blocks = weight.reshape(-1, elements)
    stored = torch.empty(len(blocks), block_bytes, dtype=torch.uint8)
    step = CHUNK_ELEMENTS // elements
    for start in range(0, len(blocks), step):
        _round_to_int8(blocks[start : start + step].float(), stored[start : start + step])
    return stored.view(weight.shape[0], -1)


def _round_to_int8(blocks: Tensor, stored: Tensor) -> None:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(scale == 0, 0.0, 1 / scale)
    size = scaled.abs()
    # Halves go away from zero, as in GGUF; torch.round takes them to even numbers.
    whole = size.floor()
    whole += size.sub_(whole) >= 0.5
    stored[:, :2] = scale.half().view(torch.uint8)
    stored[:, 2:] = whole.copysign_(scaled).to(torch.int8).view(torch.uint8)


def check_rows(kind: str, rows: Tensor, num_inputs: int) -> None:
    """Refuses bytes that are not rows of `num_inputs` elements."""
    check_inputs(kind, num_inputs)
    block_elements, block_bytes = BLOCK_SIZES[kind]
    row_bytes = num_inputs // block_elements * block_bytes
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes:
        raise ValueError(
            f"rows of {num_inputs} inputs in {kind} are uint8 [outputs, {row_bytes}]; "
            f"got {rows.dtype} {list(rows.shape)}"
        )


def check_inputs(kind: str, num_inputs: int) -> None:
    """Refuses rows that do not consist of whole blocks."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: linear layers are computed from {', '.join(KINDS)}")
    block_elements, _ = BLOCK_SIZES[kind]
    if num_inputs < 1 or num_inputs % block_elements:
        raise ValueError(
            f"num_inputs={num_inputs}: {kind} has blocks of {block_elements}, "
            "which must divide the number of inputs"
        )
