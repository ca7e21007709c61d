"""Paged attention over latents (MLA, absorbed): all query heads share one key, and its first
numbers are the value, so a tile of the cache is loaded once for both products.

The rows of a program are query heads, of one token or of several: of a request with one new token,
or a few, whose context is split over programs as in decode attention, or of a tile of a request
with many. Lengths are read on the device, so a captured graph serves any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.decode_attention import (
    EXACT,
    LOG2E,
    MIN_ROWS,
    DecodeWorkspace,
    merge_pieces,
)
from quire.kernels.triton.float8 import fitted_queries, float8_options, widen


@dataclass(frozen=True)
class LatentTiles:
    """The shape of a program."""

    rows: int
    """Most query rows: heads times tokens."""
    keys: int
    num_warps: int
    """Of a program with that many rows; smaller ones have fewer."""
    num_stages: int
    """The loop looks tables up, loads keys, and computes: 3 of them for a tile at a time, 5 to have
    another one on its way."""

    def padded_rows(self, count: int) -> int:
        """Rows of a program where there are `count` in all."""
        return min(max(MIN_ROWS, triton.next_power_of_2(count)), self.rows)

    def programs(self, count: int) -> int:
        """Programs for `count` rows."""
        return -(-count // self.padded_rows(count))


@triton.jit(do_not_specialize=["num_splits"])
def _latent_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    tile_requests_ptr,
    tile_indices_ptr,
    scale_log2,
    stride_q,
    stride_q_head,
    stride_table,
    num_splits,
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_TILED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    SEVERAL: tl.constexpr = IS_TILED or QUERIES > 1
    first_row = tl.program_id(1) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    query, head = rows // NUM_HEADS, rows % NUM_HEADS
    if IS_TILED:
        tile = tl.program_id(2)
        request = tl.load(tile_requests_ptr + tile).to(tl.int64)
        first_query = tl.load(tile_indices_ptr + tile) * QUERIES
    else:
        request = tl.program_id(2).to(tl.int64)
        first_query = 0
    context = tl.load(lens_ptr + request)
    token = tl.load(starts_ptr + request).to(tl.int64)
    end_key = context
    limit = None
    if SEVERAL:
        count = tl.load(starts_ptr + request + 1) - token.to(tl.int32)
        if not IS_TILED:
            count = tl.where(count <= QUERIES, count, 0)  # those of more are left alone
        # The last query of these rows sees the most; without queries nothing is to be done.
        end_query = (first_row + ROWS - 1) // NUM_HEADS + 1
        end_query = tl.minimum(first_query + tl.minimum(end_query, QUERIES), count)
        is_used = first_query + first_row // NUM_HEADS < end_query
        end_key = tl.where(is_used, context - count + end_query, 0)
        in_group = (query < QUERIES) & (first_query + query < count)
        limit = context - count + 1 + first_query + query
    else:
        in_group = rows < NUM_HEADS
    begin = 0
    end = end_key
    if IS_SPLIT:
        keys_per_split = tl.cdiv(tl.cdiv(end_key, KEYS), num_splits) * KEYS
        begin = tl.program_id(0) * keys_per_split
        end = tl.minimum(begin + keys_per_split, end_key)

    dims, rope_dims = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    in_rank, in_rope = dims < RANK, rope_dims < ROPE
    line = token + first_query + query
    q_mask = in_group[:, None] & in_rank[None, :]
    table = tables_ptr + request * stride_table
    wait_for_inputs(OVERLAPS)
    place = line[:, None] * stride_q + head[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptr + place, q_mask, 0.0)
    place = (line * NUM_HEADS + head)[:, None] * ROPE + rope_dims[None, :]
    q_rope = tl.load(q_rope_ptr + place, in_group[:, None] & in_rope[None, :], 0.0)
    if FLOAT8:
        dtype = tl.float32 if q.dtype == tl.float32 else tl.float16
        q, power = fitted_queries(q)
        q_rope, rope_power = fitted_queries(q_rope)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        valid = position < end
        block = tl.load(table + position // BLOCK_SIZE, valid, 0).to(tl.int64)
        row = block * BLOCK_SIZE + position % BLOCK_SIZE
        keys = cache_ptr + row[:, None] * (RANK + ROPE)
        c = tl.load(keys + dims[None, :], valid[:, None] & in_rank[None, :], 0)
        r = tl.load(keys + RANK + rope_dims[None, :], valid[:, None] & in_rope[None, :], 0)
        if FLOAT8:
            c, r = widen(c, E4M3, NATIVE).to(dtype), widen(r, E4M3, NATIVE).to(dtype)
            key_scale = tl.load(scales_ptr + row, valid, 1.0).to(tl.float32)
            if E4M3 and not NATIVE:
                key_scale = key_scale * 256.0
            scores = tl.dot(q, c.T, input_precision=EXACT) * power
            scores += tl.dot(q_rope, r.T, input_precision=EXACT) * rope_power
            # The scale of the key is that of the value too: as a logarithm it goes into the
            # weights, so that the largest that meets codes is 1, and out of their sum.
            scores = scores * (key_scale * scale_log2)[None, :] + tl.log2(key_scale)[None, :]
        else:
            scores = tl.dot(q, c.T, input_precision=EXACT)
            scores = tl.dot(q_rope, r.T, scores, input_precision=EXACT) * scale_log2
        seen = valid[None, :]
        if SEVERAL:
            seen = seen & (position[None, :] < limit[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if SEVERAL:
            # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        if FLOAT8:
            total = total * shrink + tl.sum(weights / key_scale[None, :], 1)
        else:
            total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision=EXACT)
        top = new_top

    if not IS_SPLIT:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + (line * NUM_HEADS + head)[:, None] * RANK + dims[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), q_mask)
    else:
        place = ((request * QUERIES + query) * NUM_HEADS + head) * num_splits + tl.program_id(0)
        lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + place, lse, in_group)
        if begin < end:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(partial_ptr + place[:, None] * RANK + dims[None, :], acc, q_mask)


def _launch(
    grid: tuple[int, int, int],
    q: Tensor,
    q_rope: Tensor,
    kv_layer: Tensor,
    scales: Tensor | None,
    out: Tensor,
    workspace: DecodeWorkspace | None,
    block_tables: Tensor,
    context_lens: Tensor,
    starts: Tensor,
    tile_list: tuple[Tensor, Tensor] | None,
    scale: float,
    queries: int,
    tiles: LatentTiles,
) -> None:
    _, num_heads, rank = q.shape
    rope_dim, rows = q_rope.shape[2], tiles.padded_rows(num_heads * queries)
    assert kv_layer.is_contiguous() and kv_layer.shape[-1] == rank + rope_dim
    assert q_rope.is_contiguous() and out.is_contiguous()
    _latent_kernel[grid](
        q,
        q_rope,
        kv_layer if scales is None else kv_layer.view(torch.uint8),
        scales,
        out,
        None if workspace is None else workspace.partial,
        None if workspace is None else workspace.lse,
        block_tables,
        context_lens,
        starts,
        None if tile_list is None else tile_list[0],
        None if tile_list is None else tile_list[1],
        scale * LOG2E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        grid[0],
        NUM_HEADS=num_heads,
        QUERIES=queries,
        ROWS=rows,
        RANK=rank,
        PADDED_RANK=max(16, triton.next_power_of_2(rank)),
        ROPE=rope_dim,
        PADDED_ROPE=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_SIZE=kv_layer.shape[-2],
        KEYS=tiles.keys,
        IS_TILED=tile_list is not None,
        IS_SPLIT=grid[0] > 1,
        num_warps=min(tiles.num_warps, max(4 if scales is None else 8, rows // 4)),
        num_stages=tiles.num_stages,
        **float8_options(kv_layer),
        **launch_options(out),
    )


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    kv_layer: Tensor,
    tokens: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    num_splits: int,
    workspace: DecodeWorkspace,
    out: Tensor,
    tiles: LatentTiles,
    queries: int = 1,
    scales: Tensor | None = None,
) -> None:
    """Attends with one token of q [tokens, num_heads, rank] and q_rope [tokens, num_heads,
    rope_dim] per request, named by `tokens`, to the keys of `kv_layer` [1, num_blocks, 1,
    block_size, rank + rope_dim]. Sums of latents are written to `out`, shaped like q.

    A context of 0 gives zeros. With `queries`, a power of two above 1, request r attends with the
    tokens from tokens[r] to tokens[r + 1], which are the last of its context and each see what
    precedes them. Where these are more than `queries`, or none, nothing is done.

    A cache in 8 bits has `scales` [num_blocks, 1, block_size, 1].
    """
    num_requests, (_, num_heads, _) = len(context_lens), q.shape
    assert len(block_tables) == num_requests and len(tokens) == num_requests + (queries > 1)
    assert num_splits == 1 or num_requests * queries * num_splits * num_heads <= len(workspace.lse)
    grid = (num_splits, tiles.programs(num_heads * queries), num_requests)
    _launch(
        grid, q, q_rope, kv_layer, scales, out, workspace, block_tables, context_lens, tokens, None,
        scale, queries, tiles,
    )  # fmt: skip
    if num_splits > 1:
        merge_pieces(workspace, out, tokens, num_requests, num_splits, queries)


def latent_prefill(
    q: Tensor,
    q_rope: Tensor,
    kv_layer: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tile_requests: Tensor,
    tile_indices: Tensor,
    scale: float,
    out: Tensor,
    tiles: LatentTiles,
    queries: int,
    scales: Tensor | None = None,
) -> None:
    """Attends with the tokens that tiles of `queries` tokens name, as `latent_attention` does."""
    grid = (1, tiles.programs(q.shape[1] * queries), len(tile_requests))
    _launch(
        grid, q, q_rope, kv_layer, scales, out, None, block_tables, context_lens, query_start,
        (tile_requests, tile_indices), scale, queries, tiles,
    )  # fmt: skip
