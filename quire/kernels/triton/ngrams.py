"""Drafts from a text itself: what followed when its last tokens occurred before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch.ngrams import NgramSettings

WIDTH = 1024
"""Places that a program looks at together; in long rows several times as many, as each round waits
for memory once."""
LONG = 8192


@triton.jit
def _propose_kernel(
    token_ids_ptr,
    num_tokens_ptr,
    rows_ptr,
    drafts_ptr,
    stride,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BEYOND: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    tokens = token_ids_ptr + row * stride
    last = tl.load(tokens + tl.maximum(count - 1, 0))
    # Of each lane the best place so far, and in how many tokens it agrees.
    best = tl.zeros((WIDTH,), tl.int32)
    length = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, count, WIDTH):
        place = first + tl.arange(0, WIDTH)
        agrees = (place >= LEAST) & (place < count)
        agrees = agrees & (tl.load(tokens + place - 1, agrees, -1) == last)
        if tl.max(agrees.to(tl.int32), 0) > 0:
            common = agrees.to(tl.int32)
            for i in tl.static_range(1, MOST):
                wanted = tl.load(tokens + tl.maximum(count - 1 - i, 0))
                agrees = agrees & (place > i)
                before = tl.load(tokens + place - 1 - i, agrees, -1)
                agrees = agrees & (before == wanted)
                common += agrees.to(tl.int32)
            is_better = (common >= LEAST) & (common >= length)
            best = tl.where(is_better, place, best)
            length = tl.where(is_better, common, length)
    longest = tl.max(length, 0)
    place = tl.max(tl.where(length == longest, best, 0), 0)
    column = tl.arange(0, COLUMNS)
    period = tl.maximum(count - place, 1)
    num_found = tl.where(longest > 0, tl.minimum(longest + BEYOND, NUM_DRAFTS), 0)
    draft = tl.load(tokens + place + column % period, column < num_found, -1)
    out = drafts_ptr + index * NUM_DRAFTS + column
    tl.store(out, draft, column < NUM_DRAFTS)


def propose_ngrams(
    token_ids: Tensor, num_tokens: Tensor, rows: Tensor, settings: NgramSettings
) -> Tensor:
    """As the reference."""
    shape = (len(rows), settings.num_drafts)
    drafts = torch.empty(shape, dtype=torch.int32, device=rows.device)
    is_long = token_ids.shape[1] > LONG
    _propose_kernel[(len(rows),)](
        token_ids,
        num_tokens,
        rows,
        drafts,
        token_ids.stride(0),
        LEAST=settings.least,
        MOST=settings.most,
        NUM_DRAFTS=settings.num_drafts,
        BEYOND=settings.beyond,
        COLUMNS=triton.next_power_of_2(settings.num_drafts),
        WIDTH=4 * WIDTH if is_long else WIDTH,
        num_warps=8 if is_long else 4,
    )
    return drafts
