"""The loading warp of Hopper's prefill attention, and the tiles that all warps go through.

Each cache block of keys or values is one box of the tensor memory accelerator, so that a paged
cache costs no address arithmetic. Functions of Triton's Gluon take what belongs together as tuples:

- `lists`: requests and indices of the tiles, first tokens and contexts of the requests
- `sizes`: number of tiles, slots of heads, window
- `buffers`: queries, and rings of keys and values, in shared memory
- `barriers`: for queries, keys and values each what says full, and what says empty
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)
"""Rows of a group of warps, as many as its matrix product has. A tile has two groups."""

# Older versions of Triton have another name for it.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def tile_number(turn):
    """Costly tiles come first. Every other turn goes backwards, so that all programs get alike."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def num_turns(num_tiles):
    """Tiles of this program; only the last turn may be incomplete."""
    full = num_tiles // gl.num_programs(0)
    return full + (tile_number(full) < num_tiles).to(gl.int32)


@gluon.jit
def find_tile(number, lists, sizes, QUERIES: gl.constexpr):
    """A tile's request and slot of heads, its queries, and the keys that they see."""
    requests, indices, query_start, lens = lists
    _num_tiles, num_slots, window = sizes
    request = gl.load(requests + number // num_slots)
    first_query = gl.load(indices + number // num_slots) * QUERIES
    query_begin = gl.load(query_start + request)
    num_queries = gl.load(query_start + request + 1) - query_begin
    context = gl.load(lens + request)
    first_position = context - num_queries + first_query
    lowest = gl.maximum(first_position - window + 1, 0)
    end = gl.minimum(first_position + QUERIES, context)
    queries = (first_query, query_begin, num_queries, first_position)
    return request, number % num_slots, queries, (lowest, end, context)


@gluon.jit
def load_tiles(
    q_desc,
    kv_desc,
    tables,
    stride_table,
    num_kv_heads,
    value_row,
    lists,
    sizes,
    buffers,
    barriers,
    PACK: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Fill the buffers for one tile after the other, the last keys first."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_smem.type.shape[0]
    KEYS: gl.constexpr = k_smem.type.shape[1]
    DIM: gl.constexpr = k_smem.type.shape[2]
    QUERIES: gl.constexpr = ROWS // PACK
    count = 0
    for turn in range(num_turns(sizes[0])):
        request, slot, queries, keys = find_tile(tile_number(turn), lists, sizes, 2 * QUERIES)
        first_query, query_begin, _num_queries, _first_position = queries
        lowest, end, context = keys
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 2 * ROWS * DIM * 2)
        for part in gl.static_range(2):
            token = query_begin + first_query + part * QUERIES
            load_box(q_desc, [token, slot * PACK, 0], q_full, q_smem.index(part))
        table = tables + request.to(gl.int64) * stride_table
        first_row = slot * PACK // GROUP * BLOCK_SIZE
        place = (table, first_row, num_kv_heads * BLOCK_SIZE, lowest, context, 2 * value_row)
        start = gl.cdiv(end, KEYS) * KEYS
        while start > lowest // KEYS * KEYS:
            start -= KEYS
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            load_keys(
                kv_desc, place, start, 0, k_smem.index(stage), k_full.index(stage), BLOCK_SIZE
            )
            mbarrier.wait(v_empty.index(stage), phase)
            load_keys(
                kv_desc,
                place,
                start,
                value_row,
                v_smem.index(stage),
                v_full.index(stage),
                BLOCK_SIZE,
            )
            count += 1


@gluon.jit
def load_keys(kv_desc, place, start, shift, target, full, BLOCK_SIZE: gl.constexpr):
    """Load the keys from `start` on, or with `shift` their values.

    Boxes of which nothing is seen are taken from beyond the cache: those are filled with zeros.
    """
    table, first_row, block_rows, lowest, context, beyond = place
    KEYS: gl.constexpr = target.type.shape[0]
    DIM: gl.constexpr = target.type.shape[1]
    BOX: gl.constexpr = kv_desc.block_shape[0]
    mbarrier.expect(full, KEYS * DIM * 2)
    for box in gl.static_range(KEYS // BOX):
        key = start + box * BOX
        seen = (key < context) & (key + BOX > lowest)
        block = gl.load(table + key // BLOCK_SIZE, seen, 0)
        row = gl.where(seen, block * block_rows + first_row + key % BLOCK_SIZE, beyond)
        load_box(kv_desc, [row + shift, 0], full, target.slice(box * BOX, BOX))
