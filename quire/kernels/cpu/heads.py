"""Attention of new tokens with what comes before it, in one call of the library for each layer:
norms and rotation of heads, storing keys and values, attending."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.cpu.library import AttentionCall, QKVCall, WriteCall, native


class QKVStep:
    """A step over layers whose caches are shaped like `kv_layer`. It holds addresses: the tensors
    that it is given must outlive it. Rotation tables are [positions, head_dim / 2]."""

    def __init__(
        self,
        kv_layer: Tensor,
        slots: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
    ) -> None:
        self._write = cpu.prepare_write(kv_layer, slots)
        self._attention = cpu.prepare_attention(kv_layer, query_start, context_lens, block_tables)
        self._heads = QKVCall()
        self._head_dim = kv_layer.shape[4]
        self._cos: Tensor | None = None

    def set_rotation(self, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """The rotation of the layers to come; cheap where it is the one of the last layer."""
        if cos is self._cos:
            return
        self._cos = cos
        for table in (cos, sin):
            cpu.require(table, torch.float32)
        cpu.require(positions, torch.int64)
        if not (cos.is_contiguous() and sin.is_contiguous() and 2 * cos.shape[1] == self._head_dim):
            raise ValueError(f"rotation tables must be contiguous [n, {self._head_dim} / 2]")
        self._heads.cos, self._heads.sin = cos.data_ptr(), sin.data_ptr()
        self._heads.positions = positions.data_ptr()

    def set_norms(self, q_weight: Tensor | None, k_weight: Tensor | None, eps: float) -> None:
        """The norms of the layer to come."""
        self._heads.q_norm = None if q_weight is None else q_weight.data_ptr()
        self._heads.k_norm = None if k_weight is None else k_weight.data_ptr()
        self._heads.eps = eps

    def calls(self, num_heads: int) -> tuple[QKVCall, WriteCall, AttentionCall]:
        """What layers that are carried out together share."""
        self._heads.num_heads = num_heads
        return self._heads, self._write, self._attention

    def attend(
        self,
        caches: tuple[int, int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Prepares q [T, heads, head_dim] where it is and k on its way to the cache, stores k and
        v, and attends. `caches` are the layer's `kv_addresses`."""
        q, k, v = cpu.packed_heads(q), cpu.packed_heads(k), cpu.packed_heads(v)
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads, head_dim)
        heads, write, attention = self._heads, self._write, self._attention
        heads.q = attention.q = q.data_ptr()
        heads.q_stride = attention.q_stride = q.stride(0)
        heads.num_heads = attention.num_heads = num_heads
        write.k, write.k_stride = k.data_ptr(), k.stride(0)
        write.v, write.v_stride = v.data_ptr(), v.stride(0)
        write.keys, write.values = attention.keys, attention.values = caches
        attention.out, attention.out_stride = out.data_ptr(), num_heads * head_dim
        attention.scale = scale
        attention.window = cpu.NO_WINDOW if window is None else min(window, cpu.NO_WINDOW)
        if entry()(heads, write, attention) != 0:
            raise MemoryError("no memory for the working space of attention")
        return out


@cache
def entry() -> ctypes._NamedFuncPointer:
    """The library's function; to look it up takes longer than to call it."""
    return native().quire_attend_heads
