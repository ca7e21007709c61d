"""`PendingStep`: a step's result on its way from the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.decoding.logprobs import LogprobTensors
from quire.protocol.plan import (
    Int32Array,
    PooledRows,
    PromptLogprobs,
    StepResult,
)
from quire.worker.pooling import PooledTensors


@dataclass(slots=True)
class Verified:
    """What became of the lines of a step that verified drafts."""

    counts: Tensor
    """Lines that each row that samples accepts, its first ones."""
    num_lines: Int32Array
    """Lines that each of these rows has."""
    offsets: Int32Array
    """Of each line, how many lines of its row are before it."""


class PendingStep:
    """Starts the copies to the host when made; `result` waits for those and nothing else."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: list[tuple[int, LogprobTensors]],
        pooled: PooledTensors | None = None,
        verified: Verified | None = None,
    ) -> None:
        """`prompt_logprobs` are given with their rows; all lines are accepted where `verified` does
        not say otherwise."""
        self._step = step
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _logprobs_to_host(logprobs)
        self._prompt_logprobs = [(row, _logprobs_to_host(one)) for row, one in prompt_logprobs]
        self._pooled = pooled
        if pooled is not None:
            self._pooled = PooledTensors(pooled.rows, _to_host(pooled.vectors))
        self._verified = verified
        if verified is not None:
            self._verified = replace(verified, counts=_to_host(verified.counts))
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        logprobs = self._logprobs.to_host() if self._logprobs is not None else None
        pooled, tokens = self._pooled, self._tokens.numpy()
        counts = np.ones(len(tokens), np.int32)
        if self._verified is not None:
            counts = self._verified.counts.numpy()
            accepted = self._verified.offsets < np.repeat(counts, self._verified.num_lines)
            tokens = tokens[accepted]
            logprobs = logprobs.select(accepted) if logprobs is not None else None
        return StepResult(
            self._step,
            tokens,
            counts,
            logprobs,
            [PromptLogprobs(row, scored.to_host()) for row, scored in self._prompt_logprobs],
            None if pooled is None else PooledRows(pooled.rows, pooled.vectors.numpy()),
        )


def _logprobs_to_host(logprobs: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(logprobs.index, *map(_to_host, logprobs.tensors))


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
