"""Paged attention of many queries per request: prompts and chunks of prompts.

One program computes a tile of queries of one head. Which request and which of its tiles a program
has is looked up in a list made on the host, where the numbers of new tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.decode_attention import EXACT, INNER_LOG2E, LOG2E, soft_capped
from quire.kernels.triton.float8 import ONES, fitted_queries, float8_options, scales_of, widen


@dataclass(frozen=True)
class PrefillTiles:
    """The shape of a program."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers of a thread, NVIDIA only: few enough that two programs share a multiprocessor, so
    that one computes exponentials while the other multiplies."""


@triton.jit
def _attend_to_tile(
    q,
    top,
    total,
    acc,
    keys_ptr,
    values_ptr,
    scales_ptr,
    table,
    first_row,
    block_rows,
    start,
    lowest,
    end,
    position,
    window,
    scale_log2,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The running softmax after the keys from `start` on. `top` holds scaled scores. Scales of a
    cache in 8 bits are applied as in decode attention."""
    key = start + tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED_DIM)
    if MASKED:
        # Other slots were perhaps never written and hold NaN, which a weight of 0 does not cancel.
        valid = key < end
        if HAS_WINDOW:
            valid = valid & (key >= lowest)
        block = tl.load(table + key // BLOCK_SIZE, valid, 0)
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        block = tl.load(table + key // BLOCK_SIZE)
        mask = (dims < HEAD_DIM)[None, :] if PADDED_DIM > HEAD_DIM else None
    row = (block * block_rows + first_row + key % BLOCK_SIZE).to(tl.int64)
    place = row[:, None] * HEAD_DIM + dims[None, :]
    other = None if mask is None else 0
    k = tl.load(keys_ptr + place, mask, other)
    if FLOAT8:
        words = tl.load(scales_ptr + row, valid, ONES) if MASKED else tl.load(scales_ptr + row)
        k_scale, v_log2, v_inverse = scales_of(words, E4M3, NATIVE)
        k = widen(k, E4M3, NATIVE).to(q.dtype)
    scores = tl.dot(q, k.T, input_precision=EXACT)
    if FLOAT8:
        scores = scores * (k_scale * scale_log2)[None, :]
        scale_log2 = 1.0
    if HAS_SOFTCAP:
        scores = soft_capped(scores * scale_log2, softcap)
        scale_log2 = 1.0
    if FLOAT8:
        scores = scores + v_log2[None, :]
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    base = new_top
    if MASKED and HAS_WINDOW:
        # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
        base = tl.where(new_top > float("-inf"), new_top, 0.0)
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    shrink = tl.exp2(top - base)
    v = tl.load(values_ptr + place, mask, other)
    if FLOAT8:
        total = total * shrink + tl.sum(weights * v_inverse[None, :], 1)
        v = widen(v, E4M3, NATIVE).to(q.dtype)
    else:
        total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=EXACT)
    return new_top, total, acc


@triton.jit(do_not_specialize=["stride_table", "window"])
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    out_ptr,
    tables_ptr,
    query_start_ptr,
    lens_ptr,
    tile_request_ptr,
    tile_index_ptr,
    sinks_ptr,
    scale_log2,
    softcap,
    stride_q,
    stride_out,
    stride_table,
    block_rows,
    head_rows,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
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
    q_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    token = (query_begin + rows).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * stride_q + head * HEAD_DIM + dims[None, :], q_mask, 0.0)
    if FLOAT8:
        q, power = fitted_queries(q)
        scale_log2 = scale_log2 * power
    first_position = context - num_queries + index * QUERIES
    position = first_position + tl.arange(0, QUERIES)
    end = tl.minimum(first_position + QUERIES, context)
    table = tables_ptr + request * stride_table
    first_row = (head // GROUP) * head_rows

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sinks_ptr + head) * INNER_LOG2E
        total = tl.full([QUERIES], 1.0, tl.float32)
    # Keys from `open_begin` to `open_end` are seen by every query of the tile: they need no mask.
    lowest = 0
    open_begin = 0
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0)
        open_begin = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
        for start in range(lowest // KEYS * KEYS, tl.minimum(open_begin, end), KEYS):
            top, total, acc = _attend_to_tile(
                q, top, total, acc, keys_ptr, values_ptr, scales_ptr, table, first_row,
                block_rows, start, lowest, end, position, window, scale_log2, softcap, HEAD_DIM,
                PADDED_DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, HAS_SOFTCAP, True, FLOAT8, E4M3, NATIVE,
            )  # fmt: skip
    open_end = tl.maximum((first_position + 1) // KEYS * KEYS, open_begin)
    for start in range(open_begin, open_end, KEYS):
        top, total, acc = _attend_to_tile(
            q, top, total, acc, keys_ptr, values_ptr, scales_ptr, table, first_row, block_rows,
            start, lowest, end, position, window, scale_log2, softcap, HEAD_DIM, PADDED_DIM,
            BLOCK_SIZE, KEYS, HAS_WINDOW, HAS_SOFTCAP, False, FLOAT8, E4M3, NATIVE,
        )  # fmt: skip
    for start in range(open_end, end, KEYS):
        top, total, acc = _attend_to_tile(
            q, top, total, acc, keys_ptr, values_ptr, scales_ptr, table, first_row, block_rows,
            start, lowest, end, position, window, scale_log2, softcap, HEAD_DIM, PADDED_DIM,
            BLOCK_SIZE, KEYS, HAS_WINDOW, HAS_SOFTCAP, True, FLOAT8, E4M3, NATIVE,
        )  # fmt: skip
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
    tiles: PrefillTiles,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attends with the tokens of q [tokens, num_heads, head_dim] that the tiles name. `sinks`
    [num_heads] are one more score of each head, of a key without a value."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    pages = kv_layer if scales is None else kv_layer.view(torch.uint8)
    limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    _prefill_kernel[(num_heads, len(tile_requests))](
        q,
        pages[0],
        pages[1],
        None if scales is None else scales.view(torch.int32),
        out,
        block_tables,
        query_start,
        context_lens,
        tile_requests,
        tile_indices,
        sinks,
        scale * LOG2E,
        (softcap or 0.0) * LOG2E,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv_layer.stride(1) // head_dim,
        kv_layer.stride(2) // head_dim,
        window or 0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **float8_options(kv_layer),
        **limit,
    )
