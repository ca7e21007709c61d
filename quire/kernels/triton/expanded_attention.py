"""Attention of many queries per request to keys and values that latents (MLA) were expanded to.

A chunk of the context lies in a workspace; what a chunk adds is merged with what earlier ones left
by the logarithm of the sum of exponentials. One program computes a tile of queries of one head.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.decode_attention import EXACT, LOG2E
from quire.kernels.triton.prefill_attention import PrefillTiles


@dataclass(frozen=True)
class ExpandedTiles:
    """Tiles of queries, each with the keys of its request in a chunk. All int32 [tiles]."""

    requests: Tensor
    indices: Tensor
    begins: Tensor
    """First position in the chunk; what precedes it was in earlier chunks."""
    ends: Tensor
    """Behind the last position in the chunk; may lie behind the context."""
    rows: Tensor
    """Where the first position lies."""


@triton.jit
def _attend_to_keys(
    q,
    q_rope,
    top,
    total,
    acc,
    keys_ptr,
    rope_ptr,
    start,
    end,
    begin,
    first_row,
    position,
    scale_log2,
    stride_key,
    NOPE: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax after the keys from `start` on."""
    key = start + tl.arange(0, KEYS)
    valid = (key < end)[:, None] if MASKED else True
    row = (first_row + key - begin).to(tl.int64)[:, None]
    dims, rope_dims = tl.arange(0, PADDED_NOPE)[None, :], tl.arange(0, PADDED_ROPE)[None, :]
    value_dims = tl.arange(0, PADDED_VALUE)[None, :]
    k = tl.load(keys_ptr + row * stride_key + dims, valid & (dims < NOPE), 0.0)
    r = tl.load(rope_ptr + row * ROPE + rope_dims, valid & (rope_dims < ROPE), 0.0)
    scores = tl.dot(q, k.T, input_precision=EXACT)
    scores = tl.dot(q_rope, r.T, scores, input_precision=EXACT)
    if MASKED:
        seen = (key[None, :] <= position[:, None]) & (key[None, :] < end)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
    base = tl.where(new_top > float("-inf"), new_top, 0.0)
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    place = keys_ptr + row * stride_key + NOPE + value_dims
    v = tl.load(place, valid & (value_dims < VALUE), 0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=EXACT)
    return new_top, total, acc


@triton.jit
def _expanded_kernel(
    q_ptr,
    q_rope_ptr,
    expanded_ptr,
    rope_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    lens_ptr,
    tile_requests_ptr,
    tile_indices_ptr,
    tile_begins_ptr,
    tile_ends_ptr,
    tile_rows_ptr,
    scale_log2,
    stride_q,
    stride_q_head,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(tile_requests_ptr + tile).to(tl.int64)
    index = tl.load(tile_indices_ptr + tile)
    begin = tl.load(tile_begins_ptr + tile)
    first_row = tl.load(tile_rows_ptr + tile)
    query_begin = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_begin
    context = tl.load(lens_ptr + request)
    first_position = context - num_queries + index * QUERIES
    end = tl.minimum(tl.load(tile_ends_ptr + tile), context)
    end = tl.minimum(end, first_position + QUERIES)
    if begin < end:
        rows = index * QUERIES + tl.arange(0, QUERIES)
        position = first_position + tl.arange(0, QUERIES)
        in_request = rows < num_queries
        line = (query_begin + rows).to(tl.int64)
        dims, rope_dims = tl.arange(0, PADDED_NOPE)[None, :], tl.arange(0, PADDED_ROPE)[None, :]
        value_dims = tl.arange(0, PADDED_VALUE)[None, :]
        place = q_ptr + line[:, None] * stride_q + head * stride_q_head + dims
        q = tl.load(place, in_request[:, None] & (dims < NOPE), 0.0)
        owner = line * NUM_HEADS + head
        place = q_rope_ptr + owner[:, None] * ROPE + rope_dims
        q_rope = tl.load(place, in_request[:, None] & (rope_dims < ROPE), 0.0)
        stride_key = NUM_HEADS * (NOPE + VALUE)
        keys_ptr = expanded_ptr + head * (NOPE + VALUE)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, PADDED_VALUE], tl.float32)
        # Keys before `open_end` are seen by every query of the tile: they need no mask.
        open_end = tl.minimum(end, first_position + 1)
        open_end = begin + tl.maximum(open_end - begin, 0) // KEYS * KEYS
        for start in range(begin, open_end, KEYS):
            top, total, acc = _attend_to_keys(
                q, q_rope, top, total, acc, keys_ptr, rope_ptr, start, end, begin, first_row,
                position, scale_log2, stride_key, NOPE, PADDED_NOPE, ROPE, PADDED_ROPE, VALUE,
                PADDED_VALUE, KEYS, False,
            )  # fmt: skip
        for start in range(open_end, end, KEYS):
            top, total, acc = _attend_to_keys(
                q, q_rope, top, total, acc, keys_ptr, rope_ptr, start, end, begin, first_row,
                position, scale_log2, stride_key, NOPE, PADDED_NOPE, ROPE, PADDED_ROPE, VALUE,
                PADDED_VALUE, KEYS, True,
            )  # fmt: skip
        mask = in_request[:, None] & (value_dims < VALUE)
        target = out_ptr + owner[:, None] * VALUE + value_dims
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
        if begin > 0:
            # Every query has seen the beginning of its context already.
            earlier = tl.load(lse_ptr + owner, in_request, 0.0)
            before = tl.load(target, mask, 0.0).to(tl.float32)
            new_top = tl.maximum(earlier, lse)
            kept, added = tl.exp2(earlier - new_top), tl.exp2(lse - new_top)
            acc = (before * kept[:, None] + acc * added[:, None]) / (kept + added)[:, None]
            lse = new_top + tl.log2(kept + added)
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask)
        tl.store(lse_ptr + owner, lse, in_request)


def expanded_attention(
    q: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    rope: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    chunk: ExpandedTiles,
    scale: float,
    out: Tensor,
    lse: Tensor,
    tiles: PrefillTiles,
) -> None:
    """Attends with the tokens of q [tokens, num_heads, nope_dim] and q_rope [tokens, num_heads,
    rope_dim] that the tiles name to a chunk: `expanded` [rows, num_heads * (nope_dim + value_dim)]
    and `rope` [rows, rope_dim]. Results go to `out` [tokens, num_heads, value_dim], and are merged
    there with those of earlier chunks by `lse` [tokens, num_heads]."""
    _, num_heads, nope_dim = q.shape
    rope_dim, value_dim = q_rope.shape[2], out.shape[2]
    assert q_rope.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
    assert expanded.shape[1] == num_heads * (nope_dim + value_dim) and expanded.is_contiguous()
    limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    _expanded_kernel[(num_heads, len(chunk.requests))](
        q,
        q_rope,
        expanded,
        rope,
        out,
        lse,
        query_start,
        context_lens,
        chunk.requests,
        chunk.indices,
        chunk.begins,
        chunk.ends,
        chunk.rows,
        scale * LOG2E,
        q.stride(0),
        q.stride(1),
        NUM_HEADS=num_heads,
        NOPE=nope_dim,
        PADDED_NOPE=max(16, triton.next_power_of_2(nope_dim)),
        ROPE=rope_dim,
        PADDED_ROPE=max(16, triton.next_power_of_2(rope_dim)),
        VALUE=value_dim,
        PADDED_VALUE=max(16, triton.next_power_of_2(value_dim)),
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **limit,
    )
