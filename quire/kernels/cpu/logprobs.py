"""Log-probabilities in the native library (see src/logprobs.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import LogprobsCall, native, num_threads
from quire.kernels.cpu.norm_linear import require_rows
from quire.kernels.torch.logprobs import Summary
from quire.kernels.torch.logprobs import summarize as reference


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
        return reference(logits, tokens, num_top)
    return Summary(best, log_total, ranks, top_ids.long())
