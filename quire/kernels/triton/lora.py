"""Low-rank adapters on a GPU: B A x for tokens that each have an adapter of their own.

Tokens are brought together by adapter and cut into tiles, once for a step and without waiting for
the host (`expert_tiles`). Two kernels serve all slices of a layer: one multiplies with A, each
program with some rank rows and some inputs; one sums up over inputs, multiplies with B, and adds to
the outputs. Between them numbers are in float32. All grids follow from sizes, so a CUDA graph can
hold a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_pool import CHUNK_ROWS, AdapterTokens, LayerAdapters
from quire.kernels.expert_matrices import ExpertTiles
from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.expert_tiles import tile_at, tiles_by_expert, tiles_by_pair
from quire.kernels.triton.experts import pairs_of_tile

MAX_UNSORTED_TOKENS = 4
"""Up to here each token reads its adapter for itself."""
TILE_SIZES = ((256, 16), (1024, 32))
"""Most tokens of a step, and those of a tile; with more tokens tiles have `LARGEST_TILE`."""
LARGEST_TILE = 64
ROWS = 16
"""Rank rows of a program."""
PROGRAMS_WANTED = 192
"""Of the product with A: its inputs are split until there are about as many."""
MAX_SPLITS = 16
OUTPUTS = 128
"""Of a program of the product with B."""
EMBEDDING_OUTPUTS = 256
_CHUNK = tl.constexpr(CHUNK_ROWS)
_FIELDS = tl.constexpr(8)
"""Of a slice in `LayerAdapters.layout`."""


@triton.jit
def _rank_rows(
    tables_ptr, stride_state, chunks_ptr, stride_chunk, slot, rows, count, offset, stride
):
    """Where rank rows of the adapter in a slot lie, and which of them there are."""
    exist = rows < count * _CHUNK
    chunk = tl.load(tables_ptr + slot * stride_state + rows // _CHUNK, exist, 0).to(tl.int64)
    return chunks_ptr + chunk * stride_chunk + offset + rows % _CHUNK * stride, exist


@triton.jit(do_not_specialize=["num_tiles", "num_slots", "part"])
def _shrink_kernel(
    x_ptr,
    chunks_ptr,
    tables_ptr,
    layout_ptr,
    tiles_ptr,
    pairs_ptr,
    between_ptr,
    num_tiles,
    num_slots,
    num_inputs,
    part,
    stride_x,
    stride_chunk,
    stride_state,
    stride_split,
    stride_between,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    group = tl.program_id(0) // SPLITS % GROUPS
    index = tl.program_id(0) // (SPLITS * GROUPS) % SLICES
    tile = tl.program_id(0) // (SPLITS * GROUPS * SLICES)
    slot, start, end, is_used = tile_at(
        tiles_ptr, tile, num_tiles, 0, num_slots, pairs_ptr is not None
    )
    fields = layout_ptr + index * _FIELDS
    count = tl.load(tables_ptr + slot * stride_state + tl.load(fields + 6))
    count = tl.where(is_used, count, 0)
    rows = group * ROWS + tl.arange(0, ROWS)
    a_rows, exist_rows = _rank_rows(
        tables_ptr,
        stride_state,
        chunks_ptr,
        stride_chunk,
        slot,
        rows,
        count,
        tl.multiple_of(tl.load(fields), 16),  # as all rows of the pool
        tl.multiple_of(tl.load(fields + 1), 16),
    )
    places, exist, pairs = pairs_of_tile(pairs_ptr, start, end, PAIRS)
    x_rows = x_ptr + pairs.to(tl.int64) * stride_x
    columns = tl.arange(0, INPUTS)
    acc = tl.zeros([PAIRS, ROWS], tl.float32)
    first = split * part * INPUTS
    last = tl.minimum(first + part * INPUTS, num_inputs)
    last = tl.where(group * ROWS < count * _CHUNK, last, first)  # nothing of these rows
    for begin in range(first, last, INPUTS):
        at = begin + columns
        in_inputs = at < last
        x = tl.load(x_rows[:, None] + at[None, :], exist[:, None] & in_inputs[None, :], 0.0)
        a = tl.load(a_rows[None, :] + at[:, None], exist_rows[None, :] & in_inputs[:, None], 0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    target = between_ptr + split * stride_split + places.to(tl.int64) * stride_between
    target += index * (GROUPS * ROWS)
    # The kernel just before is the product with the weight. The inputs are older, so all of the
    # above may have been done beside it.
    wait_for_inputs(OVERLAPS)
    tl.store(target[:, None] + rows[None, :], acc, exist[:, None] & exist_rows[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_slots"])
def _expand_kernel(
    between_ptr,
    chunks_ptr,
    tables_ptr,
    layout_ptr,
    tiles_ptr,
    pairs_ptr,
    bias_ptr,
    out_ptr,
    num_tiles,
    num_slots,
    stride_chunk,
    stride_state,
    stride_split,
    stride_between,
    stride_out,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    index = 0
    before = 0
    at = 0
    for one in tl.static_range(SLICES):
        blocks = tl.cdiv(tl.load(layout_ptr + one * _FIELDS + 5), OUTPUTS).to(tl.int32)
        is_own = (block >= at) & (block < at + blocks)
        index = tl.where(is_own, one, index)
        before = tl.where(is_own, at, before)
        at += blocks
    fields = layout_ptr + index * _FIELDS
    columns = (block - before) * OUTPUTS + tl.arange(0, OUTPUTS)
    first_output = tl.load(fields + 4)
    num_outputs = tl.load(fields + 5)
    if IS_ALIGNED:
        first_output = tl.multiple_of(first_output, 16)
        num_outputs = tl.multiple_of(num_outputs, 16)
    in_outputs = columns < num_outputs
    wait_for_inputs(OVERLAPS)
    slot, start, end, is_used = tile_at(
        tiles_ptr, tile, num_tiles, 0, num_slots, pairs_ptr is not None
    )
    state = tables_ptr + slot * stride_state
    count = tl.where(is_used, tl.load(state + tl.load(fields + 6)), 0)
    places, exist, pairs = pairs_of_tile(pairs_ptr, start, end, PAIRS)
    from_rows = between_ptr + places.to(tl.int64) * stride_between + index * (GROUPS * ROWS)
    acc = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    for group in range(0, tl.cdiv(count * _CHUNK, ROWS)):
        rows = group * ROWS + tl.arange(0, ROWS)
        b_rows, exist_rows = _rank_rows(
            tables_ptr,
            stride_state,
            chunks_ptr,
            stride_chunk,
            slot,
            rows,
            count,
            tl.multiple_of(tl.load(fields + 2), 16),
            tl.multiple_of(tl.load(fields + 3), 16),
        )
        mask = exist[:, None] & exist_rows[None, :]
        between = tl.zeros([PAIRS, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            part = from_rows[:, None] + split * stride_split + rows[None, :]
            between += tl.load(part, mask, 0.0)
        in_b = exist_rows[:, None] & in_outputs[None, :]
        b = tl.load(b_rows[:, None] + columns[None, :], in_b, 0.0).to(tl.float32)
        acc = tl.dot(between, b, acc, input_precision=PRECISION)
    kept = tl.where(count > 0, num_outputs, 0)
    is_there = exist[:, None] & (columns < kept)[None, :]
    outputs = first_output + columns
    target = out_ptr + pairs.to(tl.int64)[:, None] * stride_out + outputs[None, :]
    product = tl.load(target, is_there, 0.0).to(tl.float32)
    total = product + acc
    vectors = tl.where(count > 0, tl.load(state + tl.load(fields + 7)), 0)
    first_chunk = chunks_ptr + tl.load(state).to(tl.int64) * stride_chunk
    added = first_chunk + tl.load(layout_ptr + SLICES * _FIELDS + index * 2) + columns
    gains = first_chunk + tl.load(layout_ptr + SLICES * _FIELDS + index * 2 + 1) + columns
    if (vectors & 2) != 0:
        gain = tl.load(gains, in_outputs, 0.0).to(tl.float32)
        if bias_ptr is not None:
            product -= tl.load(bias_ptr + outputs, in_outputs, 0.0).to(tl.float32)[None, :]
        total += gain[None, :] * product
    if (vectors & 1) != 0:
        total += tl.load(added, in_outputs, 0.0).to(tl.float32)[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), is_there)


@triton.jit(do_not_specialize=["num_slots"])
def _embedding_kernel(
    ids_ptr,
    slots_ptr,
    chunks_ptr,
    tables_ptr,
    layout_ptr,
    out_ptr,
    num_slots,
    stride_chunk,
    stride_state,
    stride_out,
    OUTPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_outputs = columns < tl.load(layout_ptr + 5)
    wait_for_inputs(OVERLAPS)
    slot = tl.load(slots_ptr + token)
    is_used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_used, slot, 0).to(tl.int64)
    state = tables_ptr + slot * stride_state
    count = tl.where(is_used, tl.load(state + tl.load(layout_ptr + 6)), 0)
    row = tl.load(ids_ptr + token)
    acc = tl.zeros([OUTPUTS], tl.float32)
    for index in range(0, count):
        chunk = chunks_ptr + tl.load(state + index).to(tl.int64) * stride_chunk
        rows = tl.arange(0, _CHUNK)
        a = tl.load(chunk + tl.load(layout_ptr) + rows * tl.load(layout_ptr + 1) + row)
        b_rows = chunk + tl.load(layout_ptr + 2) + rows * tl.load(layout_ptr + 3)
        b = tl.load(b_rows[:, None] + columns[None, :], in_outputs[None, :], 0.0)
        acc += tl.sum(a.to(tl.float32)[:, None] * b.to(tl.float32), 0)
    target = out_ptr + token * stride_out + columns
    is_there = columns < tl.where(count > 0, tl.load(layout_ptr + 5), 0)
    total = tl.load(target, is_there, 0.0).to(tl.float32) + acc
    tl.store(target, total.to(out_ptr.dtype.element_ty), is_there)


def tiles_by_adapter(slots: Tensor, num_slots: int) -> ExpertTiles:
    """The tokens of a step, brought together by adapter; those without one are left out."""
    num_tokens = len(slots)
    if num_tokens <= MAX_UNSORTED_TOKENS:
        return tiles_by_pair(slots, 0, TILE_SIZES[0][1])
    size = next((size for most, size in TILE_SIZES if num_tokens <= most), LARGEST_TILE)
    return tiles_by_expert(slots.view(-1, 1), num_slots, 0, size)


def add_adapters(
    x: Tensor, out: Tensor, bias: Tensor | None, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, outputs] = x W^T + bias what the adapters of the tokens add to it. What
    was launched just before must have computed `out`, and not `x`."""
    pool, tiles = adapters.pool, tokens.tiles
    if not len(x):
        return
    assert tiles is not None and x.stride(1) == 1 and out.stride(1) == 1
    num_slots, num_slices = len(pool.tables), len(adapters.slices)
    num_inputs = adapters.slices[0].num_inputs
    groups = -(-pool.max_chunks * CHUNK_ROWS // ROWS)
    inputs = 64 if pool.chunks.dtype == torch.float32 else 128
    splits = num_splits(tiles.count * num_slices * groups, num_inputs, inputs)
    part = -(-num_inputs // (splits * inputs))
    width = num_slices * groups * ROWS
    between = torch.empty((splits, len(x), width), dtype=torch.float32, device=x.device)
    common = (pool.chunks, pool.tables, adapters.layout, tiles.tiles, tiles.pairs)
    options = launch_options(out)
    _shrink_kernel[(tiles.count * num_slices * groups * splits,)](
        x,
        *common,
        between,
        tiles.count,
        num_slots,
        num_inputs,
        part,
        x.stride(0),
        pool.chunks.stride(0),
        pool.tables.stride(0),
        between.stride(0),
        width,
        SLICES=num_slices,
        GROUPS=groups,
        SPLITS=splits,
        ROWS=ROWS,
        PAIRS=tiles.size,
        INPUTS=inputs,
        num_warps=4,
        **options,
    )
    blocks = sum(-(-one.num_outputs // OUTPUTS) for one in adapters.slices)
    _expand_kernel[(tiles.count, blocks)](
        between,
        *common,
        bias,
        out,
        tiles.count,
        num_slots,
        pool.chunks.stride(0),
        pool.tables.stride(0),
        between.stride(0),
        width,
        out.stride(0),
        SLICES=num_slices,
        GROUPS=groups,
        SPLITS=splits,
        ROWS=ROWS,
        PAIRS=tiles.size,
        OUTPUTS=OUTPUTS,
        PRECISION=precision(pool.chunks),
        IS_ALIGNED=all(
            one.first % 16 == 0 and one.num_outputs % 16 == 0 for one in adapters.slices
        ),
        num_warps=4,
        **options,
    )


def add_to_embedding(
    ids: Tensor, out: Tensor, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, dim], rows of a table, what adapters have for the same rows."""
    pool, (one,) = adapters.pool, adapters.slices
    if not len(ids):
        return
    _embedding_kernel[(len(ids), -(-one.num_outputs // EMBEDDING_OUTPUTS))](
        ids,
        tokens.slots,
        pool.chunks,
        pool.tables,
        adapters.layout,
        out,
        len(pool.tables),
        pool.chunks.stride(0),
        pool.tables.stride(0),
        out.stride(0),
        OUTPUTS=EMBEDDING_OUTPUTS,
        num_warps=4,
        **launch_options(out),
    )


def num_splits(programs: int, num_inputs: int, inputs: int) -> int:
    """Parts of the inputs, so that few tokens still fill the GPU; a power of two."""
    wanted = min(PROGRAMS_WANTED // programs, num_inputs // inputs, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def precision(chunks: Tensor) -> str:
    """Of products with B: its numbers in 16 bits are exact in TF32, where the GPU has that."""
    if chunks.dtype == torch.float32 or not chunks.is_cuda or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.cuda.get_device_capability(chunks.device)[0] >= 8 else "ieee"
