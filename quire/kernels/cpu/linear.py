"""Linear layers and embeddings in the native library, from weights that are packed once at load:
in float32 (see src/float_linear.h), in the blocks of a GGUF format, or in groups of inputs (see
src/quantized.h).

`quire.kernels.torch.linear` has the references, with the same names; for groups they are in
`quire.kernels.torch.quantized_weights`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from quire.kernels.adapter_pool import AdapterTokens
from quire.kernels.cpu.library import (
    FloatLinearCall,
    LayerCall,
    MatrixHandle,
    NativeMatrix,
    native,
    num_threads,
    require_rows,
)
from quire.kernels.cpu.lora import NativeAdapters, slots_address
from quire.kernels.cpu.memory import Empty
from quire.kernels.cpu.packing import GROUP, group_bytes, int8_group_bytes, pack_rows
from quire.kernels.torch.linear import KINDS, check_inputs, check_rows

FLOAT_GROUP = 16
"""Outputs that lie together, as in src/float_linear.h."""
FLOAT_KINDS = {torch.float32: -1, torch.bfloat16: -2, torch.float16: -3}
"""`FloatKind` in src/float_linear.h by what weights are stored as."""
GROUPED_KINDS = ("Grouped8", "Grouped4", "GroupedE2M1")
"""Numbers with scales for groups of inputs; `quire.kernels.cpu.quantized` packs them."""
# Rows that are rounded at a time, to bound the memory for them in float32.
ROWS_AT_ONCE = 64 * GROUP


class PackedMatrix(ABC):
    """Weights [num_outputs, num_inputs] as the library reads them."""

    @property
    @abstractmethod
    def handle(self) -> MatrixHandle:
        """What the library takes. It holds an address: the matrix must outlive it."""

    def multiply_normal(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        gated: bool = False,
        adapters: NativeAdapters | None = None,
        tokens: AdapterTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual) W^T + bias, x + residual), with silu(gate) * up of the first if
        `gated`; the residual is overwritten. What `adapters` of the tokens add is in it."""
        weight = self.handle.contents
        num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
        num_tokens, x_stride = x.shape[0], require_rows("x", x, num_inputs)
        residual_address = bias_address = None
        if residual is not None:
            if require_rows("residual", residual, num_inputs) != num_inputs or len(residual) != len(
                x
            ):
                raise ValueError(f"residual must be contiguous, with {len(x)} rows")
            residual_address = residual.data_ptr()
        if bias is not None:
            bias_address = bias.data_ptr()
        width = num_outputs // 2 if gated else num_outputs
        out = torch.empty(num_tokens, width)
        call = LayerCall(
            x.data_ptr(),
            x_stride,
            num_tokens,
            norm_weight.data_ptr(),
            eps,
            residual_address,
            bias_address,
            gated,
            out.data_ptr(),
            width,
            None if adapters is None else adapters.address,
            None if tokens is None else slots_address(tokens, num_tokens),
            num_threads(),
        )
        if _norm_entry()(self.handle, call) != 0:
            raise MemoryError("no memory for the working space of a linear layer")
        return out, x if residual is None else residual


@dataclass(frozen=True)
class FloatMatrix(PackedMatrix):
    """Weights [num_outputs, num_inputs] in floats, computed with in float32."""

    packed: Tensor
    """[groups, inputs, FLOAT_GROUP]."""
    num_outputs: int

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @cached_property
    def handle(self) -> MatrixHandle:
        shape = (self.num_outputs, self.packed.shape[1])
        kind = FLOAT_KINDS[self.packed.dtype]
        return ctypes.pointer(NativeMatrix(self.packed.data_ptr(), kind, *shape, 1))

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [tokens, inputs] in float32, into `out` if given."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        num_inputs = self.packed.shape[1]
        assert x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == num_inputs
        if out is None:
            out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.float32)
        assert out.dtype == torch.float32 and out.shape == (x.shape[0], self.num_outputs)
        assert out.stride(1) == 1 or self.num_outputs == 1
        call = FloatLinearCall(
            x=x.data_ptr(),
            weight=self.packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            num_tokens=x.shape[0],
            num_outputs=self.num_outputs,
            num_inputs=num_inputs,
            num_threads=num_threads(),
            kind=FLOAT_KINDS[self.packed.dtype],
        )
        if native().quire_float_linear(ctypes.byref(call)) != 0:
            raise MemoryError("no memory for the working space of a linear layer")
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that `ids` [n] name, [n, inputs]."""
        return self.packed[ids // FLOAT_GROUP, :, ids % FLOAT_GROUP].float()


@dataclass(frozen=True)
class FloatMatrices:
    """Matrices [num_outputs, num_inputs] in floats, which multiply inputs of their own: those of
    the heads of a layer."""

    packed: Tensor
    """[matrices, groups, inputs, FLOAT_GROUP]."""
    num_outputs: int

    def multiply(self, x: Tensor) -> Tensor:
        """[tokens, matrices, outputs] for x [tokens, matrices, inputs] in float32."""
        count, _, num_inputs, _ = self.packed.shape
        if x.dtype != torch.float32 or x.dim() != 3 or x.shape[1:] != (count, num_inputs):
            raise ValueError(
                f"x must be float32 [tokens, {count}, {num_inputs}]; got {x.dtype} {list(x.shape)}"
            )
        if x.stride(2) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), count, self.num_outputs)
        call = FloatLinearCall(
            x=x.data_ptr(),
            weight=self.packed.data_ptr(),
            bias=None,
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            num_tokens=len(x),
            num_outputs=self.num_outputs,
            num_inputs=num_inputs,
            num_threads=num_threads(),
            kind=FLOAT_KINDS[self.packed.dtype],
        )
        native().quire_float_linears(call, count, x.stride(1), out.stride(1))
        return out


@dataclass(frozen=True)
class BlockMatrix(PackedMatrix):
    """Quantised weights [num_outputs, num_inputs]."""

    kind: str
    num_outputs: int
    num_inputs: int
    data: Tensor
    """uint8 [groups of 32 rows, bytes], as src/quantized.h describes it."""
    input_planes: int = 1
    """Bytes for each input that is multiplied with it: 1 for 8 bits, 2 for 16."""
    order: Tensor | None = None
    """int32 [columns]: the input of each column, or -1 if it only fills a block. None: columns are
    inputs."""
    scale_blocks: int = 1
    """Blocks of 32 columns that share a scale in grouped kinds."""
    has_zeros: bool = False
    """Whether grouped kinds have zeros."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.order is None else self.order.nbytes)

    @cached_property
    def handle(self) -> MatrixHandle:
        native_matrix = NativeMatrix(
            self.data.data_ptr(),
            (*KINDS, *GROUPED_KINDS).index(self.kind),
            self.num_outputs,
            self.num_inputs,
            self.input_planes,
            None if self.order is None else self.order.data_ptr(),
            0 if self.order is None else len(self.order),
            self.scale_blocks,
            self.has_zeros,
        )
        return ctypes.pointer(native_matrix)

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [tokens, inputs] in float32, which is rounded first, to as many bits
        as the matrix has planes for.

        A token with an infinity or NaN gets NaN for all outputs. `out` may be some columns of a
        wider tensor.
        """
        x_stride = require_rows("x", x, self.num_inputs)
        num_tokens = x.shape[0]
        if out is None:
            out = torch.empty(num_tokens, self.num_outputs)
            out_stride = self.num_outputs
        else:
            out_stride = require_rows("out", out, self.num_outputs)
            if out.shape[0] != num_tokens:
                raise ValueError(f"out has {out.shape[0]} rows for {num_tokens} tokens")
        bias_address = None
        if bias is not None:
            require_rows("bias", bias.unsqueeze(0), self.num_outputs)
            bias_address = bias.data_ptr()
        status = _linear_entry()(
            self.handle,
            x.data_ptr(),
            x_stride,
            num_tokens,
            bias_address,
            out.data_ptr(),
            out_stride,
            num_threads(),
        )
        if status != 0:
            raise MemoryError("no memory for the rounded inputs of a linear layer")
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that `ids` [n] name, exactly, in float32 [n, inputs]."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.num_inputs)
        if native().quire_packed_rows(self.handle, ids.data_ptr(), len(ids), out.data_ptr()) != 0:
            raise IndexError(f"ids must be from 0 to {self.num_outputs - 1}")
        return out


def pack_floats(
    shards: Sequence[Tensor], empty: Empty = torch.empty, dtype: torch.dtype = torch.float32
) -> FloatMatrix:
    """A matrix of shards [outputs, inputs] one below the other, in memory that `empty` gives.

    Missing outputs of the last group are 0. Nothing is copied on the way, for shards may be large.
    """
    total, num_inputs = sum(len(shard) for shard in shards), shards[0].shape[1]
    packed = empty((-(-total // FLOAT_GROUP), num_inputs, FLOAT_GROUP), dtype=dtype)
    by_output = packed.transpose(1, 2)
    if total % FLOAT_GROUP:
        packed[-1] = 0.0
    at = 0
    for shard in shards:
        while len(shard):
            group, first = divmod(at, FLOAT_GROUP)
            full = len(shard) // FLOAT_GROUP
            if first == 0 and full:
                count = full * FLOAT_GROUP
                by_output[group : group + full] = shard[:count].view(full, FLOAT_GROUP, num_inputs)
            else:
                count = min(FLOAT_GROUP - first, len(shard))
                by_output[group, first : first + count] = shard[:count]
            at, shard = at + count, shard[count:]
    return FloatMatrix(packed, total)


def pack_matrices(weights: Tensor) -> FloatMatrices:
    """Float32 weights [matrices, outputs, inputs]; missing outputs of their last groups are 0."""
    count, num_outputs, num_inputs = weights.shape
    packed = torch.zeros(count, -(-num_outputs // FLOAT_GROUP), num_inputs, FLOAT_GROUP)
    full, rest = divmod(num_outputs, FLOAT_GROUP)
    by_output = packed.transpose(2, 3)
    whole = weights[:, : full * FLOAT_GROUP]
    by_output[:, :full] = whole.unflatten(1, (full, FLOAT_GROUP))
    if rest:
        by_output[:, full, :rest] = weights[:, full * FLOAT_GROUP :]
    return FloatMatrices(packed, num_outputs)


def float_bytes(num_outputs: int, num_inputs: int) -> int:
    """What a matrix takes in float32."""
    return -(-num_outputs // FLOAT_GROUP) * FLOAT_GROUP * num_inputs * torch.float32.itemsize


def pack_blocks(kind: str, rows: Tensor, num_inputs: int, input_planes: int = 1) -> BlockMatrix:
    """Packs rows [outputs, bytes] of blocks of this kind, as in a GGUF file."""
    check_rows(kind, rows, num_inputs)
    return BlockMatrix(kind, len(rows), num_inputs, pack_rows(kind, rows), input_planes)


def packed_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    """What a matrix takes in blocks of this kind."""
    check_inputs(kind, num_inputs)
    return -(-num_outputs // GROUP) * group_bytes(kind, num_inputs)


def quantize_int8(weight: Tensor) -> BlockMatrix:
    """Weights [outputs, inputs] of any floating type in 8 bits."""
    num_outputs, num_inputs = weight.shape
    check_inputs("Q8_0", num_inputs)
    data = torch.empty(-(-num_outputs // GROUP), int8_group_bytes(num_inputs), dtype=torch.uint8)
    pieces = zip(weight.split(ROWS_AT_ONCE), data.split(ROWS_AT_ONCE // GROUP), strict=True)
    for piece, groups in pieces:
        rows = piece.float().contiguous()
        native().quire_pack_int8(
            rows.data_ptr(), rows.stride(0), len(rows), num_inputs, groups.data_ptr()
        )
    return BlockMatrix("Q8_0", num_outputs, num_inputs, data)


# To look a function of the library up takes longer than to call it.


@cache
def _linear_entry() -> ctypes._NamedFuncPointer:
    return native().quire_packed_linear


@cache
def _norm_entry() -> ctypes._NamedFuncPointer:
    return native().quire_norm_linear
