"""Attention of many requests to the leading blocks that they share, which are read once for all.

Queries of several requests are packed into one tile: their heads that share a KV head are its rows.
The results are partial, one per split of the prefix; `decode_attention` starts from them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.decode_attention import (
    LOG2E,
    DecodeWorkspace,
    as_loaded,
    attend_to_range,
)
from quire.kernels.triton.float8 import float8_options


@triton.jit(do_not_specialize=["num_splits"])
def _prefix_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    partial_ptr,
    lse_ptr,
    tables_ptr,
    tokens_ptr,
    members_ptr,
    lens_ptr,
    scale_log2,
    softcap,
    stride_q,
    block_rows,
    head_rows,
    stride_table,
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(2)
    kv_head = tl.program_id(1)
    split = tl.program_id(0)
    wait_for_inputs(OVERLAPS)
    length = tl.load(lens_ptr + tile)
    if length == 0:
        return
    tiles_per_split = tl.cdiv(tl.cdiv(length, TILE), num_splits)
    begin = split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, length)

    rows = tl.arange(0, MEMBERS * PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    member = tl.load(members_ptr + tile * MEMBERS + rows // PADDED_GROUP).to(tl.int64)
    used = (member >= 0) & (rows % PADDED_GROUP < GROUP)
    head = kv_head * GROUP + rows % PADDED_GROUP
    token = tl.load(tokens_ptr + member, used, 0).to(tl.int64)
    in_head = dims < HEAD_DIM
    q_mask = used[:, None] & in_head[None, :]
    q_offset = token * stride_q + head * HEAD_DIM
    q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], q_mask, 0.0)

    top = tl.full([MEMBERS * PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS * PADDED_GROUP], tl.float32)
    acc = tl.zeros([MEMBERS * PADDED_GROUP, PADDED_DIM], tl.float32)
    # All members have these blocks, so any member's table will do.
    table = tables_ptr + tl.load(members_ptr + tile * MEMBERS).to(tl.int64) * stride_table
    first_row = kv_head * head_rows
    top, total, acc = attend_to_range(
        q, top, total, acc, keys_ptr, values_ptr, scales_ptr, table, first_row, block_rows, begin,
        end, None, None, scale_log2, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False, False,
        HAS_SOFTCAP, FLOAT8, E4M3, NATIVE,
    )  # fmt: skip

    place = (member * NUM_HEADS + head) * num_splits + split
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    tl.store(lse_ptr + place, lse, used)
    if begin < end:
        acc = acc / total[:, None]
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, q_mask)


def prefix_attention(
    q: Tensor,
    kv_layer: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    members: Tensor,
    prefix_lens: Tensor,
    scale: float,
    num_splits: int,
    workspace: DecodeWorkspace,
    tile: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Leaves in the workspace what each member's line of q sees of its tile's shared prefix.

    `members` [tiles, requests per tile] holds indices into `tokens`, padded with -1 behind the
    first; `prefix_lens` [tiles] the tokens that the members share, 0 for an unused tile.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    num_tiles, num_members = members.shape
    group = num_heads // num_kv_heads
    limit = {} if max_registers is None else {"maxnreg": max_registers}
    assert len(tokens) * num_splits <= workspace.max_pieces
    keys, values, words = as_loaded(kv_layer, scales)
    _prefix_kernel[(num_splits, num_kv_heads, num_tiles)](
        q,
        keys,
        values,
        words,
        workspace.partial,
        workspace.lse,
        block_tables,
        tokens,
        members,
        prefix_lens,
        scale * LOG2E,
        (softcap or 0.0) * LOG2E,
        q.stride(0),
        kv_layer.stride(1) // head_dim,
        kv_layer.stride(2) // head_dim,
        block_tables.stride(0),
        num_splits,
        NUM_HEADS=num_heads,
        GROUP=group,
        PADDED_GROUP=triton.next_power_of_2(group),
        MEMBERS=num_members,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tile,
        HAS_SOFTCAP=softcap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **limit,
        **float8_options(kv_layer),
        **launch_options(q),
    )
