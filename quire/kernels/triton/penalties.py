"""Repetition, frequency and presence penalties, in the lines that have them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch.penalties import PenaltySettings

WIDTH = 2048


@triton.jit
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    uses_ptr,
    slot_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab_size,
    stride,
    WIDTH: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + line)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot > 0:
        tokens = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        mask = tokens < vocab_size
        uses = tl.load(uses_ptr + slot * vocab_size + tokens, mask, 0)
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        # Most tokens have no use: their logits need not even be read.
        used = uses != 0
        logit = tl.load(logits_ptr + line * stride + tokens, used, 0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        counts = (uses >> 1).to(tl.float32)
        logit -= counts * frequency
        logit -= tl.minimum(counts, 1.0) * presence
        tl.store(logits_ptr + line * stride + tokens, logit, used)


def penalize(logits: Tensor, rows: Tensor, uses: Tensor, settings: PenaltySettings) -> None:
    """As the reference, bit for bit."""
    num_lines, vocab_size = logits.shape
    assert uses.shape[1] == vocab_size and uses.is_contiguous()
    _penalize_kernel[(-(-vocab_size // WIDTH), num_lines)](
        logits,
        rows,
        uses,
        settings.slot,
        settings.repetition,
        settings.frequency,
        settings.presence,
        vocab_size,
        logits.stride(0),
        WIDTH=WIDTH,
        num_warps=4,
        # A fused multiply-add would round once where the reference rounds twice.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["count"])
def _count_kernel(uses_ptr, rows_ptr, tokens_ptr, slot_ptr, count, vocab_size, WIDTH: tl.constexpr):
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = lane < count
    row = tl.load(rows_ptr + lane, mask, 0)
    slot = tl.load(slot_ptr + row, mask, 0).to(tl.int64)
    token = tl.load(tokens_ptr + lane, mask, 0)
    tl.atomic_add(uses_ptr + slot * vocab_size + token, 2, slot > 0)


def count_uses(uses: Tensor, rows: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Adds two to the entry of each token in its row's slot, if the row has one."""
    _count_kernel[(-(-len(rows) // 128),)](
        uses, rows, tokens, slots, len(rows), uses.shape[1], WIDTH=128, num_warps=4
    )
