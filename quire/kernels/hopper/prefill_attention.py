"""Prefill attention for Hopper: loads, matrix products and exponentials at the same time.

Written in Gluon, Triton's lower level, because only there can warps have different roles. One warp
loads. Two groups of four warps attend with 64 rows each, a row being a query of one head; the query
heads that share a KV head are packed into them. A group multiplies the next scores and the last
weights while it computes exponentials. Programs stay on their multiprocessor and take one tile of
queries after the other, so that loading never pauses.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.hopper.loader import ROWS, find_tile, load_tiles, num_turns, tile_number
from quire.kernels.triton.decode_attention import INNER_LOG2E, LOG2E

TILE_ROWS = 2 * ROWS.value
KEYS = 128
STAGES = 2
"""Two pairs of tiles of keys and values fill the shared memory."""
UNLIMITED = 1 << 30
"""A window that no context reaches."""

TWO_LOG2E = gl.constexpr(2 * LOG2E)

# Older versions of Triton have another name for it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _soft_capped(scores, softcap):
    """softcap * tanh(scores / softcap); both in units of log 2."""
    return softcap - 2 * softcap / (1 + gl.exp2(scores * (TWO_LOG2E / softcap)))


@gluon.jit
def _softmax(
    scores, top, total, start, position, window, scale_log2, softcap,
    MASKED: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Weights of the scores, what older weights shrink by, and the new top and total."""
    layout: gl.constexpr = scores.type.layout
    if HAS_SOFTCAP:
        scores = _soft_capped(scores * scale_log2, softcap)
        scale_log2 = 1.0
    if MASKED:
        key = start + gl.arange(0, scores.type.shape[1], layout=gl.SliceLayout(0, layout))
        # Keys after the query have a negative age, which is a huge one without a sign.
        age = (position[:, None] - key[None, :]).to(gl.uint32)
        scores = gl.where(age < window.to(gl.uint32), scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    base = new_top
    if MASKED:
        # A row that has seen nothing yet keeps a top of -inf, and must not become NaN.
        base = gl.where(new_top > float("-inf"), new_top, 0.0)
    weights = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _start_scores(q, k_smem, k_full, count, s_layout: gl.constexpr):
    stages: gl.constexpr = k_smem.type.shape[0]
    keys: gl.constexpr = k_smem.type.shape[1]
    mbarrier.wait(k_full.index(count % stages), (count // stages) & 1)
    zeros = gl.zeros([ROWS, keys], gl.float32, s_layout)
    k = k_smem.index(count % stages).permute((1, 0))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_values(weights, acc, v_smem, v_full, count, p_layout: gl.constexpr):
    stages: gl.constexpr = v_smem.type.shape[0]
    mbarrier.wait(v_full.index(count % stages), (count // stages) & 1)
    p = gl.convert_layout(weights.to(v_smem.dtype), p_layout)
    return warpgroup_mma(p, v_smem.index(count % stages), acc, is_async=True), p


@gluon.jit
def _release(empty, count):
    """All warps of the group are done with a buffer."""
    barrier()
    mbarrier.arrive(empty.index(count % empty.type.shape[0]), count=1)


@gluon.jit
def _clear(v_smem, v_full, count, low, high, layout: gl.constexpr):
    """Keep the values from `low` to `high`. Others were perhaps never written and are NaN, which a
    weight of 0 does not cancel. Both groups do it; they write the same."""
    stages: gl.constexpr = v_smem.type.shape[0]
    mbarrier.wait(v_full.index(count % stages), (count // stages) & 1)
    values = v_smem.index(count % stages)
    key = gl.arange(0, v_smem.type.shape[1], layout=gl.SliceLayout(1, layout))
    kept = (key >= low) & (key < high)
    values.store(gl.where(kept[:, None], values.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _advance(
    q, buffers, barriers, state, count, start, position, window, scale_log2, softcap,
    MASKED: gl.constexpr, HAS_SOFTCAP: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from `start` on, while the weights before them meet their values."""
    _q_smem, k_smem, v_smem = buffers
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    weights, top, total, acc = state
    pending = _start_scores(q, k_smem, k_full, count, s_layout)
    acc, p = _start_values(weights, acc, v_smem, v_full, count - 1, p_layout)
    scores = warpgroup_mma_wait(1, [pending])
    _release(k_empty, count)
    weights, shrink, top, total = _softmax(
        scores, top, total, start, position, window, scale_log2, softcap, MASKED, HAS_SOFTCAP
    )
    acc, p = warpgroup_mma_wait(0, [acc, p])
    _release(v_empty, count - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return weights, top, total, acc


@gluon.jit
def _attend(
    out_ptr,
    stride_out,
    sinks_ptr,
    scale_log2,
    softcap,
    lists,
    sizes,
    buffers,
    barriers,
    HEAD_DIM: gl.constexpr,
    PACK: gl.constexpr,
    PART: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Attend with one half of each tile."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_tiles, _num_slots, window = sizes
    keys: gl.constexpr = k_smem.type.shape[1]
    DIM: gl.constexpr = k_smem.type.shape[2]
    QUERIES: gl.constexpr = ROWS // PACK
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    q = q_smem.index(PART).reshape([ROWS, DIM])
    count = 0
    for turn in range(num_turns(num_tiles)):
        _request, slot, queries, range_ = find_tile(tile_number(turn), lists, sizes, 2 * QUERIES)
        first_query, query_begin, num_queries, first_position = queries
        lowest, end, context = range_
        first = first_position + PART * QUERIES
        place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
        position = first + place // PACK
        if HAS_SINKS:
            top = gl.load(sinks_ptr + slot * PACK + place % PACK) * INNER_LOG2E
            total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, s_layout))
        else:
            top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        # From the last keys to the first. All rows see those from `open_begin` to `open_end`.
        begin = lowest // keys * keys
        open_begin = gl.cdiv(gl.maximum(first + QUERIES - window, begin), keys) * keys
        open_end = gl.maximum((first + 1) // keys * keys, open_begin)
        start = (end - 1) // keys * keys
        mbarrier.wait(q_full, turn & 1)
        pending = _start_scores(q, k_smem, k_full, count, s_layout)
        scores = warpgroup_mma_wait(0, [pending])
        _release(k_empty, count)
        weights, _shrink, top, total = _softmax(
            scores, top, total, start, position, window, scale_log2, softcap, True, HAS_SOFTCAP
        )
        if context < start + keys:
            _clear(v_smem, v_full, count, 0, context - start, io_layout)
        state = (weights, top, total, acc)
        count += 1
        while start > open_end:
            start -= keys
            state = _advance(
                q, buffers, barriers, state, count, start, position, window, scale_log2, softcap,
                True, HAS_SOFTCAP, s_layout, p_layout,
            )  # fmt: skip
            count += 1
        while start > open_begin:
            start -= keys
            state = _advance(
                q, buffers, barriers, state, count, start, position, window, scale_log2, softcap,
                False, HAS_SOFTCAP, s_layout, p_layout,
            )  # fmt: skip
            count += 1
        while start > begin:
            start -= keys
            state = _advance(
                q, buffers, barriers, state, count, start, position, window, scale_log2, softcap,
                True, HAS_SOFTCAP, s_layout, p_layout,
            )  # fmt: skip
            count += 1
        mbarrier.arrive(q_empty, count=1)
        weights, top, total, acc = state
        if start < lowest:
            _clear(v_smem, v_full, count - 1, lowest - start, keys, io_layout)
        acc, p = _start_values(weights, acc, v_smem, v_full, count - 1, p_layout)
        acc, p = warpgroup_mma_wait(0, [acc, p])
        _release(v_empty, count - 1)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), io_layout)
        row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, io_layout))
        query = first_query + row // PACK
        token = (query_begin + query).to(gl.int64)
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, io_layout))
        target = out_ptr + (token * stride_out + (slot * PACK + row % PACK) * HEAD_DIM)[:, None]
        mask = (query < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
        gl.store(target + dims[None, :], out, mask)


# Numbers differ from step to step. A kernel for each of their divisors would be compiled while
# requests wait.
@gluon.jit(
    do_not_specialize=[
        "stride_table",
        "num_tiles",
        "num_slots",
        "window",
        "num_kv_heads",
        "value_row",
    ]
)
def _prefill_kernel(
    q_desc,
    kv_desc,
    out_ptr,
    tables_ptr,
    query_start_ptr,
    lens_ptr,
    requests_ptr,
    indices_ptr,
    sinks_ptr,
    scale_log2,
    softcap,
    stride_out,
    stride_table,
    num_tiles,
    num_slots,
    window,
    num_kv_heads,
    value_row,
    HEAD_DIM: gl.constexpr,
    PACK: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    DIM: gl.constexpr = kv_desc.block_shape[1]
    dtype: gl.constexpr = kv_desc.dtype
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS // PACK, PACK, DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], kv_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], one)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    lists = (requests_ptr, indices_ptr, query_start_ptr, lens_ptr)
    sizes = (num_tiles, num_slots, window)
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_attend, (out_ptr, stride_out, sinks_ptr, scale_log2, softcap, lists, sizes, buffers,
                       barriers, HEAD_DIM, PACK, 0, HAS_SOFTCAP, HAS_SINKS)),
            (_attend, (out_ptr, stride_out, sinks_ptr, scale_log2, softcap, lists, sizes, buffers,
                       barriers, HEAD_DIM, PACK, 1, HAS_SOFTCAP, HAS_SINKS)),
            (load_tiles, (q_desc, kv_desc, tables_ptr, stride_table, num_kv_heads, value_row,
                          lists, sizes, buffers, barriers, PACK, GROUP, BLOCK_SIZE)),
        ],
        [4, 1],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def packed_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads of a KV head that share a tile: all of them where they divide its rows."""
    group = num_heads // num_kv_heads
    return group if ROWS.value % group == 0 else 1


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
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attends with the tokens of q [tokens, num_heads, head_dim] that the tiles name.

    A tile has `TILE_ROWS / packed_heads` queries. `sinks` [num_heads] are one more score of each
    head, of a key without a value.
    """
    assert scales is None, "a cache in 8 bits is not read"
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    pack = packed_heads(num_heads, num_kv_heads)
    num_slots = num_heads // pack
    num_tiles = len(tile_requests) * num_slots
    cache = kv_layer.view(-1, head_dim)
    padded_dim = triton.next_power_of_2(head_dim)
    q_box = [ROWS.value // pack, pack, padded_dim]
    cache_box = [min(block_size, KEYS), padded_dim]
    _prefill_kernel[(min(num_tiles, _multiprocessors(q.device)),)](
        TensorDescriptor.from_tensor(q, q_box, gl.NVMMASharedLayout(128, 16, 3)),
        TensorDescriptor.from_tensor(cache, cache_box, gl.NVMMASharedLayout(128, 16, 2)),
        out,
        block_tables,
        query_start,
        context_lens,
        tile_requests,
        tile_indices,
        out if sinks is None else sinks,  # read where there are sinks
        scale * LOG2E,
        (softcap or 0.0) * LOG2E,
        out.stride(0),
        block_tables.stride(0),
        num_tiles,
        num_slots,
        UNLIMITED if window is None else window,
        num_kv_heads,
        len(cache) // 2,
        HEAD_DIM=head_dim,
        PACK=pack,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        KEYS=KEYS,
        STAGES=STAGES,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        # Three groups of four warps have 168 registers a thread each; the loading one lends its.
        ATTEND_REGISTERS=240,
        LOAD_REGISTERS=24,
        num_warps=4,
        maxnreg=168,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
