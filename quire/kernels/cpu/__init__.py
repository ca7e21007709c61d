"""Paged attention in float32 on a CPU: a small C++ library that the package builds (see src/).

`heads.QKVStep` attends; `prepare_*` does once for a step what its layers share. The library is
optional: `available` says whether it is there, and if not, why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import (
    AttentionCall,
    WriteCall,
    available,
    isas,
    num_threads,
    set_isa,
    set_num_threads,
)

__all__ = [
    "available",
    "isas",
    "prepare_attention",
    "prepare_write",
    "set_isa",
    "set_num_threads",
]

# Types of keys and values, at the places that the library knows them by.
STORED = (torch.float32, torch.float16)
# Positions minus a window must stay within int32.
NO_WINDOW = 2**30


def prepare_write(kv_layer: Tensor, slots: Tensor) -> WriteCall:
    """What the layers of a step share. It holds addresses: `slots` must outlive it."""
    require(slots, torch.int64)
    call = WriteCall()
    call.slots, call.num_tokens = slots.data_ptr(), slots.shape[0]
    set_shape(call, kv_layer)
    return call


def prepare_attention(
    kv_layer: Tensor, query_start: Tensor, context_lens: Tensor, block_tables: Tensor
) -> AttentionCall:
    """What the layers of a step share. It holds addresses: the tensors must outlive it."""
    for tensor in (query_start, context_lens, block_tables):
        require(tensor, torch.int32)
    call = AttentionCall()
    call.query_start, call.context_lens = query_start.data_ptr(), context_lens.data_ptr()
    call.block_tables, call.table_stride = block_tables.data_ptr(), block_tables.stride(0)
    call.num_requests = context_lens.shape[0]
    set_shape(call, kv_layer)
    return call


def set_shape(call: AttentionCall | WriteCall, kv_layer: Tensor) -> None:
    """Enters the shape of a layer's cache and the number of threads."""
    require(kv_layer, *STORED)
    call.stored = STORED.index(kv_layer.dtype)
    _, call.block_stride, call.head_stride, call.token_stride, _ = kv_layer.stride()
    _, _, call.num_kv_heads, call.block_size, call.head_dim = kv_layer.shape
    call.num_threads = num_threads()


def kv_addresses(kv_layer: Tensor) -> tuple[int, int]:
    """Where a layer's keys and values begin."""
    keys = kv_layer.data_ptr()
    return keys, keys + kv_layer.stride(0) * kv_layer.element_size()


def packed_heads(x: Tensor) -> Tensor:
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
