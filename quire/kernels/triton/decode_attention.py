"""Paged attention of one query per request, or of a few, split over the context.

The query heads that share a KV head, of all queries of a request, are packed into the rows of one
matrix product, so each key and value is read once. A request's context is cut into at most
`num_splits` pieces; how long a piece is follows from the request's own length on the device, so a
captured graph serves any lengths. A second kernel merges the pieces by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.float8 import (
    ONES,
    fitted_queries,
    float8_options,
    scales_of,
    widen_pairs,
)

LOG2E = 1.4426950408889634
TWO_LOG2E = tl.constexpr(2 * LOG2E)
INNER_LOG2E = tl.constexpr(LOG2E)
EXACT = tl.constexpr("ieee")
"""Products of float32 are not rounded to fewer bits. For 16 bits it makes no difference, but the
other way, tf32, is refused by most GPUs of AMD."""
MERGED_DIMS = 128
"""Most numbers of a head that a program of the merging kernel has."""
MIN_ROWS = 16
"""Rows of the smallest matrix product; query heads are padded to it."""


@triton.jit
def soft_capped(scores, softcap):
    """softcap * tanh(scores / softcap); both in units of log 2."""
    return softcap - 2 * softcap / (1 + tl.exp2(scores * (TWO_LOG2E / softcap)))


@triton.jit
def attend_to_range(
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
    begin,
    end,
    lowest,
    limit,
    scale_log2,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_LOWEST: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The running softmax of rows over the positions from `begin` to `end`, of which each row sees
    those below its `limit`, and from its `lowest` on, where there are such.

    A cache in 8 bits is read in pairs of codes, so queries and results are halved into those of
    even and of odd dimensions. Scales of keys multiply scores. Scales of values are added to them,
    as logarithms: that makes the weights of the product with the codes, the largest of which is 1.
    Divided by the scales again they are summed up.
    """
    WIDTH: tl.constexpr = PADDED_DIM // 2 if FLOAT8 else PADDED_DIM
    LENGTH: tl.constexpr = HEAD_DIM // 2 if FLOAT8 else HEAD_DIM
    dims = tl.arange(0, WIDTH)
    in_head = dims < LENGTH
    if FLOAT8:
        q, power = fitted_queries(q)
        scale_log2 = scale_log2 * power
        q_even, q_odd = tl.split(tl.reshape(q, [q.shape[0], WIDTH, 2]))
        acc_even, acc_odd = tl.split(tl.reshape(acc, [q.shape[0], WIDTH, 2]))
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        valid = position < end
        block = tl.load(table + position // BLOCK_SIZE, valid, 0).to(tl.int64)
        row = block * block_rows + first_row + position % BLOCK_SIZE
        place = row[:, None] * LENGTH + dims[None, :]
        kv_mask = valid[:, None] & in_head[None, :]
        k = tl.load(keys_ptr + place, kv_mask, 0)
        if FLOAT8:
            words = tl.load(scales_ptr + row, valid, ONES)
            k_scale, v_log2, v_inverse = scales_of(words, E4M3, NATIVE)
            k_even, k_odd = widen_pairs(k, E4M3, NATIVE)
            scores = tl.dot(q_even, tl.trans(k_even.to(q.dtype)), input_precision=EXACT)
            scores = tl.dot(q_odd, tl.trans(k_odd.to(q.dtype)), scores, input_precision=EXACT)
            scores = scores * (k_scale * scale_log2)[None, :]
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale_log2
        if HAS_SOFTCAP:
            scores = soft_capped(scores, softcap)
        if FLOAT8:
            scores = scores + v_log2[None, :]
        seen = valid[None, :]
        if HAS_LIMIT:
            seen = seen & (position[None, :] < limit[:, None])
        if HAS_LOWEST:
            seen = seen & (position[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if HAS_LIMIT:
            # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(values_ptr + place, kv_mask, 0)
        if FLOAT8:
            total = total * shrink + tl.sum(weights * v_inverse[None, :], 1)
            v_even, v_odd = widen_pairs(v, E4M3, NATIVE)
            weights = weights.to(q.dtype)
            acc_even, acc_odd = acc_even * shrink[:, None], acc_odd * shrink[:, None]
            acc_even = tl.dot(weights, v_even.to(q.dtype), acc_even, input_precision=EXACT)
            acc_odd = tl.dot(weights, v_odd.to(q.dtype), acc_odd, input_precision=EXACT)
        else:
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=EXACT)
        top = new_top
    if FLOAT8:
        acc = tl.interleave(acc_even, acc_odd)
    return top, total, acc


# Values that differ from call to call are not specialised on: each variant costs compile time.
@triton.jit(do_not_specialize=["num_splits", "prefix_splits", "window"])
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    tables_ptr,
    lens_ptr,
    tokens_ptr,
    starts_ptr,
    prefix_partial_ptr,
    prefix_lse_ptr,
    sinks_ptr,
    scale_log2,
    softcap,
    stride_q,
    stride_out,
    block_rows,
    head_rows,
    stride_table,
    window,
    num_splits,
    prefix_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    request = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(0)
    context = tl.load(lens_ptr + request)
    token = tl.load(tokens_ptr + request).to(tl.int64)
    first = 0
    if QUERIES > 1:
        count = tl.load(tokens_ptr + request + 1) - token.to(tl.int32)
        count = tl.where(count <= QUERIES, count, 0)  # those of more are left alone
        context = tl.where(count > 0, context, 0)
        if HAS_WINDOW:
            first = tl.maximum(context - count + 1 - window, 0)
    elif HAS_WINDOW:
        first = tl.maximum(context - window, 0)
    if HAS_PREFIX:
        first = tl.load(starts_ptr + request)
    tiles = tl.cdiv(context - first, TILE)
    tiles_per_split = tl.cdiv(tiles, num_splits)
    begin = first + split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, context)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    lowest = None
    limit = None
    if QUERIES > 1:
        query = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        in_group = query < count
        line = (token + query)[:, None]
        owner = request * QUERIES + query
        limit = context - count + 1 + query
        lowest = limit - window
    else:
        head = kv_head * GROUP + rows
        in_group = rows < GROUP
        line = token
        owner = request
    in_head = dims < HEAD_DIM
    q_mask = in_group[:, None] & in_head[None, :]
    table = tables_ptr + request * stride_table
    first_row = kv_head * head_rows
    wait_for_inputs(OVERLAPS)
    q = tl.load(q_ptr + line * stride_q + head[:, None] * HEAD_DIM + dims[None, :], q_mask, 0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if HAS_SINKS:
        # The first piece begins with what has no value.
        sink = tl.load(sinks_ptr + head, in_group, 0.0) * INNER_LOG2E
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    if HAS_PREFIX:
        # The shared prefix comes first, as the partial results that its own kernel left.
        pieces = tl.where((first > 0) & (split == 0), prefix_splits, 0)
        for piece in range(pieces):
            place = (request * NUM_HEADS + head) * prefix_splits + piece
            lse = tl.load(prefix_lse_ptr + place, in_group, 0.0)
            # Both are loaded at once; where lse is -inf there may be anything.
            part_ptr = prefix_partial_ptr + place[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(part_ptr, q_mask, 0.0)
            part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
            new_top = tl.maximum(top, lse)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            top = new_top
    top, total, acc = attend_to_range(
        q, top, total, acc, keys_ptr, values_ptr, scales_ptr, table, first_row, block_rows, begin,
        end, lowest, limit, scale_log2, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE,
        HAS_WINDOW and QUERIES > 1, QUERIES > 1, HAS_SOFTCAP, FLOAT8, E4M3, NATIVE,
    )  # fmt: skip

    if not IS_SPLIT:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + line * stride_out + head[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), q_mask)
    else:
        place = (owner * NUM_HEADS + head) * num_splits + split
        lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + place, lse, in_group)
        has_result = begin < end
        if HAS_PREFIX:
            # A row that has just computed the last token of what it shares has no others.
            has_result = has_result | (pieces > 0)
        if HAS_SINKS:
            has_result = has_result | (split == 0)
        if has_result:
            if QUERIES > 1:
                # An early query may see nothing of the last piece.
                total = tl.where(total > 0, total, 1.0)
            acc = acc / total[:, None]
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, q_mask)


def padded_splits(num_splits: int) -> int:
    """Two sizes of tiles rather than one for each number: each is compiled on its own."""
    return 16 if num_splits <= 16 else triton.next_power_of_2(max(num_splits, 64))


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    tokens_ptr,
    stride_out,
    num_splits,
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    owner = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.program_id(2) * PADDED_DIM + tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    if QUERIES > 1:
        request, query = owner // QUERIES, owner % QUERIES
        start = tl.load(tokens_ptr + request)
        count = tl.load(tokens_ptr + request + 1) - start
        count = tl.where(count <= QUERIES, count, 0)
        token = start.to(tl.int64) + query
        num_parts = tl.where(query < count, num_splits, 0)
        in_head = dims < tl.where(query < count, HEAD_DIM, 0)
    else:
        num_parts = num_splits
    place = (owner * NUM_HEADS + head) * num_splits + splits
    wait_for_inputs(OVERLAPS)
    lse = tl.load(lse_ptr + place, splits < num_parts, float("-inf"))
    used = lse > float("-inf")
    top = tl.max(lse, 0)
    weights = tl.where(used, tl.exp2(lse - top), 0.0)
    mask = used[:, None] & in_head[None, :]
    parts = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask, 0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    if QUERIES == 1:
        token = tl.load(tokens_ptr + owner).to(tl.int64)
    target = out_ptr + token * stride_out + head * HEAD_DIM + dims
    tl.store(target, merged.to(out_ptr.dtype.element_ty), in_head)


class DecodeWorkspace:
    """Partial results of split contexts, shared by all layers and steps."""

    def __init__(self, max_pieces: int, num_heads: int, head_dim: int, device: torch.device):
        """`max_pieces` bounds requests times queries of each times splits."""
        self.max_pieces = max_pieces
        self.partial = torch.empty(
            max_pieces * num_heads * head_dim, dtype=torch.float32, device=device
        )
        self.lse = torch.empty(max_pieces * num_heads, dtype=torch.float32, device=device)


def merge_pieces(
    workspace: DecodeWorkspace,
    out: Tensor,
    tokens: Tensor,
    num_requests: int,
    num_splits: int,
    queries: int,
) -> None:
    """Writes to the lines of `out` [tokens, num_heads, head_dim] what became of the pieces of each
    context; `tokens` as in `decode_attention`."""
    _, num_heads, head_dim = out.shape
    padded = min(triton.next_power_of_2(head_dim), MERGED_DIMS)
    _merge_kernel[(num_heads, num_requests * queries, -(-head_dim // padded))](
        workspace.partial,
        workspace.lse,
        out,
        tokens,
        out.stride(0),
        num_splits,
        NUM_HEADS=num_heads,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        PADDED_SPLITS=padded_splits(num_splits),
        num_warps=2,
        **launch_options(out),
    )


@dataclass(frozen=True)
class PrefixPieces:
    """What `prefix_attention` left: attention to the first `starts[r]` tokens of request r."""

    starts: Tensor
    workspace: DecodeWorkspace
    num_splits: int


def as_loaded(kv_layer: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and the scales of both, as `attend_to_range` reads them."""
    if scales is None:
        return kv_layer[0], kv_layer[1], None
    pairs = kv_layer.view(torch.uint16)
    return pairs[0], pairs[1], scales.view(torch.int32)


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    tokens: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    num_splits: int,
    workspace: DecodeWorkspace,
    out: Tensor,
    tile: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    prefix: PrefixPieces | None = None,
    queries: int = 1,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attends with one line of q [tokens, num_heads, head_dim] per request, named by `tokens`.

    A context of 0 gives zeros. What `prefix` covers of a context is taken from there.

    With `queries`, a power of two above 1, request r attends with the lines from tokens[r] to
    tokens[r + 1], which are the last of its context and each see what precedes them. Where these
    are more than `queries`, or none, nothing is done.

    A cache in 8 bits has `scales` [num_blocks, num_kv_heads, block_size, 2]. `sinks` [num_heads]
    are one more score of each head, of a key without a value.
    """
    num_requests, (_, num_heads, head_dim) = len(context_lens), q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    group = num_heads // num_kv_heads
    assert len(block_tables) == num_requests and len(tokens) == num_requests + (queries > 1)
    assert num_splits == 1 or num_requests * queries * num_splits <= workspace.max_pieces
    assert prefix is None or (window is None and queries == 1)
    padded = triton.next_power_of_2(head_dim)
    keys, values, words = as_loaded(kv_layer, scales)
    _decode_kernel[(num_splits, num_kv_heads, num_requests)](
        q,
        keys,
        values,
        words,
        out,
        workspace.partial,
        workspace.lse,
        block_tables,
        context_lens,
        tokens,
        prefix.starts if prefix else None,
        prefix.workspace.partial if prefix else None,
        prefix.workspace.lse if prefix else None,
        sinks,
        scale * LOG2E,
        (softcap or 0.0) * LOG2E,
        q.stride(0),
        out.stride(0),
        kv_layer.stride(1) // head_dim,
        kv_layer.stride(2) // head_dim,
        block_tables.stride(0),
        window or 0,
        num_splits,
        prefix.num_splits if prefix else 0,
        NUM_HEADS=num_heads,
        GROUP=group,
        QUERIES=queries,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group * queries)),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        BLOCK_SIZE=block_size,
        TILE=tile,
        IS_SPLIT=num_splits > 1,
        HAS_PREFIX=prefix is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **float8_options(kv_layer),
        **launch_options(out),
    )
    if num_splits > 1:
        merge_pieces(workspace, out, tokens, num_requests, num_splits, queries)
