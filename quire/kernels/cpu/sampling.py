"""From logits to tokens in the native library: sampling, masks, penalties, log-probabilities. The
references in `quire.kernels.torch` have the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import (
    LogprobsCall,
    SamplingCall,
    native,
    num_threads,
    require_column,
    require_rows,
)
from quire.kernels.torch.logprobs import Summary
from quire.kernels.torch.logprobs import summarize as summarize_reference
from quire.kernels.torch.penalties import PenaltySettings
from quire.kernels.torch.sampling import RowSettings


def largest(logits: Tensor) -> Tensor:
    """The place of the largest number in each line of float32 [S, V], as `argmax` has it: the first
    of equals, and NaN above all. int32 [S]."""
    num_lines, width = logits.shape
    stride = require_rows("logits", logits, width)
    out = torch.empty(num_lines, dtype=torch.int32)
    native().quire_largest(
        logits.data_ptr(), stride, num_lines, width, out.data_ptr(), num_threads()
    )
    return out


def sample_tokens(logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings) -> Tensor:
    """One token for each line of float32 logits [S, V]; see the reference. int32 [S]."""
    num_lines, width = logits.shape
    stride = require_rows("logits", logits, width)
    require_column("rows", rows, torch.int64, num_lines)
    require_column("positions", positions, torch.int32, len(positions))
    for name in ("seed_low", "seed_high", "top_k"):
        require_column(name, getattr(settings, name), torch.int32, len(positions))
    for name in ("temperature", "top_p", "log_min_p"):
        require_column(name, getattr(settings, name), torch.float32, len(positions))
    out = torch.empty(num_lines, dtype=torch.int32)
    call = SamplingCall(
        logits=logits.data_ptr(),
        stride=stride,
        num_lines=num_lines,
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        positions=positions.data_ptr(),
        temperature=settings.temperature.data_ptr(),
        seed_low=settings.seed_low.data_ptr(),
        seed_high=settings.seed_high.data_ptr(),
        top_k=settings.top_k.data_ptr(),
        top_p=settings.top_p.data_ptr(),
        log_min_p=settings.log_min_p.data_ptr(),
        width=width,
        num_threads=num_threads(),
    )
    if native().quire_sample(call) != 0:
        raise MemoryError("no memory for the working space of drawing tokens")
    return out


def apply_bitmask(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """As `quire.kernels.torch.bitmask.apply_bitmask`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert lines.dtype == bits.dtype == torch.int32
    assert lines.is_contiguous() and bits.is_contiguous()
    native().quire_apply_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        lines.data_ptr(),
        bits.data_ptr(),
        len(lines),
        bits.shape[1],
        num_threads(),
    )


def penalize(logits: Tensor, rows: Tensor, uses: Tensor, settings: PenaltySettings) -> None:
    """As the reference, bit for bit."""
    num_lines, vocab_size = logits.shape
    stride = require_rows("logits", logits, vocab_size)
    require_column("rows", rows, torch.int64, num_lines)
    require_column("slot", settings.slot, torch.int32, len(settings.slot))
    require_column("uses", uses.view(-1), torch.int32, len(uses) * vocab_size)
    for name in ("repetition", "frequency", "presence"):
        require_column(name, getattr(settings, name), torch.float32, len(settings.slot))
    native().quire_penalize(
        logits.data_ptr(),
        stride,
        vocab_size,
        rows.data_ptr(),
        num_lines,
        uses.data_ptr(),
        settings.slot.data_ptr(),
        settings.repetition.data_ptr(),
        settings.frequency.data_ptr(),
        settings.presence.data_ptr(),
    )


def summarize(logits: Tensor, tokens: Tensor, num_top: int) -> Summary:
    """As the reference, which also gets the lines that the library does not take: those with
    infinity or NaN, or without any number."""
    num_lines, width = logits.shape
    stride = require_rows("logits", logits, width)
    tokens = tokens.int().contiguous()
    if num_lines and not 0 <= int(tokens.min()) <= int(tokens.max()) < width:
        raise ValueError(f"tokens must be from 0 to {width - 1}; got {tokens.tolist()}")
    if num_top > width:
        raise ValueError(f"num_top={num_top} is more than the {width} tokens that there are")
    best, log_total = torch.empty(num_lines, 1), torch.empty(num_lines, 1)
    ranks = torch.empty(num_lines, dtype=torch.int32)
    top_ids = torch.empty((num_lines, num_top), dtype=torch.int32)
    call = LogprobsCall(
        logits=logits.data_ptr(),
        stride=stride,
        num_lines=num_lines,
        tokens=tokens.data_ptr(),
        best=best.data_ptr(),
        log_total=log_total.data_ptr(),
        ranks=ranks.data_ptr(),
        top_ids=top_ids.data_ptr(),
        num_top=num_top,
        width=width,
        num_threads=num_threads(),
    )
    if native().quire_summarize(call) != 0:
        raise MemoryError("no memory for the working space of log-probabilities")
    if not bool(best.isfinite().all()):
        return summarize_reference(logits, tokens, num_top)
    return Summary(best, log_total, ranks, top_ids.long())
