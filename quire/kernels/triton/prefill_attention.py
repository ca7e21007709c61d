"""Paged attention of many queries per request: prompts and chunks of prompts.

One program computes a tile of queries of one head. Which request and which of its tiles a program
has is looked up in a list made on the host, where the numbers of new tokens are known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.decode_attention import LOG2E


@triton.jit
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    tables_ptr,
    query_start_ptr,
    lens_ptr,
    tile_request_ptr,
    tile_index_ptr,
    scale_log2,
    stride_q,
    stride_out,
    stride_block,
    stride_head,
    stride_table,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(tile_request_ptr + tile).to(tl.int64)
    index = tl.load(tile_index_ptr + tile)
    query_begin = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_begin
    context = tl.load(lens_ptr + request)
    rows = index * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    row_mask = rows < num_queries
    q_mask = row_mask[:, None] & in_head[None, :]
    token = (query_begin + rows).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * stride_q + head * HEAD_DIM + dims[None, :], q_mask, 0.0)
    first_position = context - num_queries + index * QUERIES
    position = first_position + tl.arange(0, QUERIES)
    end = tl.minimum(first_position + QUERIES, context)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    table = tables_ptr + request * stride_table
    kv_offset = (head // GROUP) * stride_head
    # Keys below `open_end` are seen by every query of the tile: no mask is needed.
    open_end = begin
    if not HAS_WINDOW:
        open_end = (first_position + 1) // KEYS * KEYS
    for start in range(begin, open_end, KEYS):
        key = start + tl.arange(0, KEYS)
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        slot = block * stride_block + kv_offset + (key % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(keys_ptr + slot[None, :] + dims[:, None], in_head[:, None], 0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values_ptr + slot[:, None] + dims[None, :], in_head[None, :], 0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    for start in range(open_end, end, KEYS):
        key = start + tl.arange(0, KEYS)
        valid = key < end
        block = tl.load(table + key // BLOCK_SIZE, valid, 0).to(tl.int64)
        slot = block * stride_block + kv_offset + (key % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(
            keys_ptr + slot[None, :] + dims[:, None], valid[None, :] & in_head[:, None], 0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        seen = (key[None, :] <= position[:, None]) & valid[None, :]
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
        safe_top = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values_ptr + slot[:, None] + dims[None, :], valid[:, None] & in_head[None, :], 0.0
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out_ptr + token[:, None] * stride_out + head * HEAD_DIM + dims[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), q_mask)


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tile_requests: Tensor,
    tile_indices: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    queries: int = 128,
    keys: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
) -> None:
    """Attends with the tokens of q [tokens, num_heads, head_dim] that the tiles name."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    exact = q.dtype == torch.float32
    _prefill_kernel[(num_heads, len(tile_requests))](
        q,
        kv_layer[0],
        kv_layer[1],
        out,
        block_tables,
        query_start,
        context_lens,
        tile_requests,
        tile_indices,
        scale * LOG2E,
        q.stride(0),
        out.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        block_tables.stride(0),
        window or 0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        KEYS=keys,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if exact else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
