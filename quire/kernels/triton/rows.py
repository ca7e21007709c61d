"""Rows on the device: the batch of a step, sampled and accepted tokens into rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch.rows import DraftedRows

WIDTH = 128
"""Rows of one program."""


class RowTensors(NamedTuple):
    """The rows of a row table."""

    token_ids: Tensor
    """int32 [rows, tokens]."""
    num_computed: Tensor
    """int32 [rows]."""
    block_tables: Tensor
    """int32 [rows, blocks]."""


class TokenTensors(NamedTuple):
    """What a model is told about the tokens of a step, int64 each."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    """-1 for padding."""

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> TokenTensors:
        return cls(*(torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)))

    def first(self, count: int) -> TokenTensors:
        return TokenTensors(*(tensor[:count] for tensor in self))


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
    rows: Tensor, table: RowTensors, block_size: int, out: TokenTensors, out_lens: Tensor
) -> None:
    """Inputs of a step that computes one token for each of `rows`; -1 marks padding.

    Padding gets slot -1 and context 0. The rows count as computed afterwards.
    """
    count = len(rows)
    _gather_decode_kernel[(triton.cdiv(count, WIDTH),)](
        rows,
        *table,
        *out,
        out_lens,
        count,
        table.token_ids.stride(0),
        table.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=WIDTH,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_tokens_kernel(
    rows_ptr,
    starts_ptr,
    token_ids_ptr,
    num_computed_ptr,
    tables_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_slots_ptr,
    num_rows,
    num_tokens,
    stride_tokens,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    lane = tl.arange(0, ROWS)
    ends = tl.load(starts_ptr + 1 + lane, lane < num_rows, 1 << 30)
    index = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    used = index < num_rows
    row = tl.load(rows_ptr + index, used, 0).to(tl.int64)
    start = tl.load(starts_ptr + index, used, 0)
    position = tl.where(used, tl.load(num_computed_ptr + row, used, 0) + token - start, 0)
    value = tl.load(token_ids_ptr + row * stride_tokens + position, used, 0)
    block = tl.load(tables_ptr + row * stride_table + position // BLOCK_SIZE, used, 0)
    slot = tl.where(used, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    inside = token < num_tokens
    tl.store(out_tokens_ptr + token, value.to(tl.int64), inside)
    tl.store(out_positions_ptr + token, position.to(tl.int64), inside)
    tl.store(out_slots_ptr + token, slot, inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _divide_rows_kernel(
    rows_ptr,
    starts_ptr,
    num_computed_ptr,
    out_lens_ptr,
    out_single_tokens_ptr,
    out_single_lens_ptr,
    num_rows,
    num_tokens,
    ROWS: tl.constexpr,
    HAS_SINGLES: tl.constexpr,
):
    lane = tl.arange(0, ROWS)
    inside = lane < num_rows
    row = tl.load(rows_ptr + lane, inside, -1).to(tl.int64)
    used = row >= 0
    start = tl.load(starts_ptr + lane, inside, 0)
    count = tl.load(starts_ptr + 1 + lane, inside, 0) - start
    context = tl.load(num_computed_ptr + row, used, 0) + count
    is_single = used & (count == 1)
    tl.store(out_lens_ptr + lane, tl.where(used, context, 1), lane <= num_rows)
    if HAS_SINGLES:
        tl.store(out_single_tokens_ptr + lane, tl.where(is_single, start, num_tokens - 1), inside)
        tl.store(out_single_lens_ptr + lane, tl.where(is_single, context, 0), inside)
    tl.store(num_computed_ptr + row, context, used)


def gather_mixed(
    rows: Tensor,
    starts: Tensor,
    table: RowTensors,
    block_size: int,
    out: TokenTensors,
    out_lens: Tensor,
    out_singles: tuple[Tensor, Tensor] | None,
) -> None:
    """Inputs of a step in which row `rows[i]` computes the tokens `starts[i]` to `starts[i + 1]`.

    Rows of -1 are padding behind the others, as are the tokens behind the last row's: they get slot
    -1. `out_lens` holds the contexts and a 1 behind them. The rows count as computed afterwards.

    Rows with one new token are named again by the first of `out_singles`, with their contexts in
    the second; others name the last token there, which must be padding, with a context of 0.
    """
    num_rows, num_tokens = len(rows), len(out.ids)
    width = triton.next_power_of_2(max(num_rows + 1, 512))  # few sizes: each is compiled
    _gather_tokens_kernel[(triton.cdiv(num_tokens, 32),)](
        rows,
        starts,
        *table,
        *out,
        num_rows,
        num_tokens,
        table.token_ids.stride(0),
        table.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=width,
        WIDTH=32,
        num_warps=4,
    )
    _divide_rows_kernel[(1,)](
        rows,
        starts,
        table.num_computed,
        out_lens,
        *(out_singles or (None, None)),
        num_rows,
        num_tokens,
        ROWS=width,
        HAS_SINGLES=out_singles is not None,
        num_warps=4,
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
    """Append `tokens[i]` to row `rows[i]` where `appends` (per row) is not 0."""
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


@triton.jit(do_not_specialize=["count", "length"])
def _write_drafts_kernel(
    rows_ptr,
    drafts_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_drafts_ptr,
    count,
    length,
    stride,
    NUM_DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = lane < count
    row = tl.load(rows_ptr + lane, mask, 0).to(tl.int64)
    known = tl.load(num_tokens_ptr + row, mask, 0)
    place = token_ids_ptr + row * stride + known
    fits = mask
    written = tl.zeros((WIDTH,), tl.int32)
    for i in range(NUM_DRAFTS):
        draft = tl.load(drafts_ptr + lane * NUM_DRAFTS + i, mask, -1)
        fits = fits & (draft >= 0) & (known + i < length)
        tl.store(place + i, draft, fits)
        written += fits.to(tl.int32)
    tl.store(num_drafts_ptr + row, written, mask)


def write_drafts(rows: Tensor, drafts: Tensor, table: DraftedRows) -> None:
    """As the reference."""
    count, num_drafts = drafts.shape
    _write_drafts_kernel[(-(-count // WIDTH),)](
        rows,
        drafts,
        table.token_ids,
        table.num_tokens,
        table.num_drafts,
        count,
        table.token_ids.shape[1],
        table.token_ids.stride(0),
        NUM_DRAFTS=num_drafts,
        WIDTH=WIDTH,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["count"])
def _accept_kernel(
    rows_ptr,
    first_lines_ptr,
    num_lines_ptr,
    tokens_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    num_drafts_ptr,
    appends_ptr,
    out_ptr,
    count,
    stride,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = lane < count
    row = tl.load(rows_ptr + lane, mask, 0).to(tl.int64)
    first = tl.load(first_lines_ptr + lane, mask, 0)
    num_lines = tl.load(num_lines_ptr + lane, mask, 0)
    appends = mask & (tl.load(appends_ptr + row, mask, 0) != 0)
    known = tl.load(num_tokens_ptr + row, mask, 0)
    num_verified = tl.minimum(num_lines - 1, tl.load(num_drafts_ptr + row, mask, 0))
    place = token_ids_ptr + row * stride + known
    accepted = tl.where(mask, 1, 0)
    for i in range(tl.max(num_lines, 0)):
        reached = mask & (accepted == i + 1)
        token = tl.load(tokens_ptr + first + i, reached, 0)
        draft = tl.load(place + i, reached & (i < num_verified), -1)
        tl.store(place + i, token, reached & appends)
        accepted += tl.where(reached & (draft == token), 1, 0)
    tl.store(num_tokens_ptr + row, known + accepted, appends)
    tl.store(num_computed_ptr + row, known + accepted - 1, appends)
    tl.store(num_drafts_ptr + row, 0, mask)
    tl.store(out_ptr + lane, accepted, mask)


def accept_tokens(
    rows: Tensor, first_lines: Tensor, num_lines: Tensor, tokens: Tensor, table: DraftedRows
) -> Tensor:
    """As the reference."""
    count = len(rows)
    out = torch.empty(count, dtype=torch.int32, device=rows.device)
    _accept_kernel[(-(-count // WIDTH),)](
        rows,
        first_lines,
        num_lines,
        tokens,
        *table,
        out,
        count,
        table.token_ids.stride(0),
        WIDTH=WIDTH,
        num_warps=1,
    )
    return out
