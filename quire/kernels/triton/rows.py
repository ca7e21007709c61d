"""Row bookkeeping on the device: the batch of a decode step, and sampled tokens into their rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 128
"""Rows of one program."""


@triton.jit(do_not_specialize=["count"])
def _gather_decode_kernel(
    rows_ptr,
    token_ids_ptr,
    num_computed_ptr,
    tables_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_slots_ptr,
    out_lens_ptr,
    count,
    stride_tokens,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = lane < count
    row = tl.load(rows_ptr + lane, mask, -1).to(tl.int64)
    used = row >= 0
    position = tl.load(num_computed_ptr + row, used, 0)
    token = tl.load(token_ids_ptr + row * stride_tokens + position, used, 0)
    block = tl.load(tables_ptr + row * stride_table + position // BLOCK_SIZE, used, 0)
    slot = tl.where(used, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(out_tokens_ptr + lane, token.to(tl.int64), mask)
    tl.store(out_positions_ptr + lane, position.to(tl.int64), mask)
    tl.store(out_slots_ptr + lane, slot, mask)
    tl.store(out_lens_ptr + lane, tl.where(used, position + 1, 0), mask)
    tl.store(num_computed_ptr + row, position + 1, used)


def gather_decode(
    rows: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    block_size: int,
    out_tokens: Tensor,
    out_positions: Tensor,
    out_slots: Tensor,
    out_lens: Tensor,
) -> None:
    """Inputs of a step that computes one token for each of `rows`; -1 marks padding.

    Padding gets slot -1 and context 0. The rows count as computed afterwards.
    """
    count = len(rows)
    _gather_decode_kernel[(triton.cdiv(count, WIDTH),)](
        rows,
        token_ids,
        num_computed,
        block_tables,
        out_tokens,
        out_positions,
        out_slots,
        out_lens,
        count,
        token_ids.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=WIDTH,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["count"])
def _append_kernel(
    rows_ptr,
    tokens_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    appends_ptr,
    count,
    stride,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = lane < count
    row = tl.load(rows_ptr + lane, mask, 0).to(tl.int64)
    wanted = mask & (tl.load(appends_ptr + row, mask, 0) != 0)
    at = tl.load(num_tokens_ptr + row, wanted, 0)
    token = tl.load(tokens_ptr + lane, wanted, 0)
    tl.store(token_ids_ptr + row * stride + at, token, wanted)
    tl.store(num_tokens_ptr + row, at + 1, wanted)


def append_tokens(
    rows: Tensor, tokens: Tensor, token_ids: Tensor, num_tokens: Tensor, appends: Tensor
) -> None:
    """Append `tokens[i]` to row `rows[i]` where `appends` (bool per row) says so."""
    count = len(rows)
    _append_kernel[(-(-count // WIDTH),)](
        rows,
        tokens,
        token_ids,
        num_tokens,
        appends,
        count,
        token_ids.stride(0),
        WIDTH=WIDTH,
        num_warps=1,
    )
