"""Attention of new tokens with what comes before it, in one call of the library for each layer:
norms and rotation of queries and keys, storing keys and values, attending."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from quire.kernels.cpu.library import AttentionCall, QKVCall, WriteCall, native, num_threads

STORED = (torch.float32, torch.float16)
"""Types of keys and values, at the places that the library knows them by."""
NO_WINDOW = 2**30
"""Positions minus a window must stay within int32."""


class QKVStep:
    """A step over layers whose caches are shaped like `kv_layer`. It holds addresses: the tensors
    that it is given must outlive it. Rotation tables are [positions, rotary_dim / 2]."""

    def __init__(
        self,
        kv_layer: Tensor,
        slots: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
    ) -> None:
        require(slots, torch.int64)
        for tensor in (query_start, context_lens, block_tables):
            require(tensor, torch.int32)
        self._write = WriteCall(slots=slots.data_ptr(), num_tokens=slots.shape[0])
        self._attention = AttentionCall(
            query_start=query_start.data_ptr(),
            context_lens=context_lens.data_ptr(),
            block_tables=block_tables.data_ptr(),
            table_stride=block_tables.stride(0),
            num_requests=context_lens.shape[0],
        )
        for call in (self._write, self._attention):
            _set_shape(call, kv_layer)
        self._qkv = QKVCall()
        self._head_dim = kv_layer.shape[4]
        self._cos: Tensor | None = None

    def set_rotation(
        self, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
    ) -> None:
        """The rotation of the layers to come; cheap where it is the one of the last layer."""
        if cos is self._cos:
            return
        self._cos = cos
        for table in (cos, sin):
            require(table, torch.float32)
        require(positions, torch.int64)
        rotary_dim = 2 * cos.shape[1]
        is_whole = cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape
        if not is_whole or rotary_dim > self._head_dim:
            raise ValueError(
                f"rotation tables must be contiguous [n, at most {self._head_dim} / 2]"
            )
        self._qkv.rotary_dim, self._qkv.interleaved = rotary_dim, interleaved
        self._qkv.cos, self._qkv.sin = cos.data_ptr(), sin.data_ptr()
        self._qkv.positions = positions.data_ptr()

    def clear_rotation(self) -> None:
        """The layers to come have no rotation."""
        self._cos = self._qkv.cos = self._qkv.sin = self._qkv.positions = None

    def set_norms(self, q_weight: Tensor | None, k_weight: Tensor | None, eps: float) -> None:
        """The norms of the layer to come."""
        self._qkv.q_norm = None if q_weight is None else q_weight.data_ptr()
        self._qkv.k_norm = None if k_weight is None else k_weight.data_ptr()
        self._qkv.eps = eps

    def calls(self, num_heads: int) -> tuple[QKVCall, WriteCall, AttentionCall]:
        """What layers that are carried out together share."""
        self._qkv.num_heads = num_heads
        return self._qkv, self._write, self._attention

    def attend(
        self,
        caches: tuple[int, int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Prepares q [T, heads, head_dim] where it is and k on its way to the cache, stores k and
        v, and attends. `caches` are the layer's `kv_addresses`; `sinks` [heads] are those of
        `AttentionStep.attend`."""
        q, k, v = _packed_heads(q), _packed_heads(k), _packed_heads(v)
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads, head_dim)
        qkv, write, attention = self._qkv, self._write, self._attention
        qkv.q = attention.q = q.data_ptr()
        qkv.q_stride = attention.q_stride = q.stride(0)
        qkv.num_heads = attention.num_heads = num_heads
        write.k, write.k_stride = k.data_ptr(), k.stride(0)
        write.v, write.v_stride = v.data_ptr(), v.stride(0)
        write.keys, write.values = attention.keys, attention.values = caches
        attention.out, attention.out_stride = out.data_ptr(), num_heads * head_dim
        attention.scale, attention.softcap = scale, softcap or 0.0
        attention.sinks = None if sinks is None else _sink_address(sinks, num_heads)
        attention.window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        if _entry()(qkv, write, attention) != 0:
            raise MemoryError("no memory for the working space of attention")
        return out


@cache
def _entry() -> ctypes._NamedFuncPointer:
    """The library's function; to look it up takes longer than to call it."""
    return native().quire_attend_qkv


def _set_shape(call: AttentionCall | WriteCall, kv_layer: Tensor) -> None:
    """Enters the shape of a layer's cache and the number of threads."""
    require(kv_layer, *STORED)
    call.stored = STORED.index(kv_layer.dtype)
    _, call.block_stride, call.head_stride, call.token_stride, _ = kv_layer.stride()
    _, _, call.num_kv_heads, call.block_size, call.head_dim = kv_layer.shape
    call.num_threads = num_threads()


def kv_addresses(kv_layer: Tensor) -> tuple[int, int]:
    """Where a layer's keys and values begin: at the same place in a latent layer."""
    keys = kv_layer.data_ptr()
    return keys, keys + (len(kv_layer) - 1) * kv_layer.stride(0) * kv_layer.element_size()


def _sink_address(sinks: Tensor, num_heads: int) -> int:
    require(sinks, torch.float32)
    if sinks.shape != (num_heads,):
        raise ValueError(f"expected sinks of {num_heads} heads, got {list(sinks.shape)}")
    return sinks.data_ptr()


def _packed_heads(x: Tensor) -> Tensor:
    """`x` [tokens, heads, head_dim] with each token's heads contiguous; tokens may be apart."""
    require(x, torch.float32)
    return x if x.stride(1) == x.shape[2] else x.contiguous()


def require(x: Tensor, *dtypes: torch.dtype) -> None:
    """Refuses what the library would read wrongly."""
    if x.dtype not in dtypes or x.device.type != "cpu" or (x.stride(-1) != 1 and x.numel() > 1):
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"expected a {wanted} tensor on the CPU, contiguous in its last dimension; "
            f"got {x.dtype} on {x.device} with strides {x.stride()}"
        )
