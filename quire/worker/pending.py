"""`PendingStep`: a step's result on its way from the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.decoding.logprobs import LogprobTensors
from quire.protocol.plan import PooledRows, PromptLogprobs, StepResult
from quire.worker.pooling import PooledTensors


class PendingStep:
    """Starts the copies to the host when made; `result` waits for those and nothing else."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: list[tuple[int, LogprobTensors]],
        pooled: PooledTensors | None = None,
    ) -> None:
        """`prompt_logprobs` are given with their rows."""
        self._step = step
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _logprobs_to_host(logprobs)
        self._prompt_logprobs = [(row, _logprobs_to_host(one)) for row, one in prompt_logprobs]
        self._pooled = pooled
        if pooled is not None:
            self._pooled = PooledTensors(pooled.rows, _to_host(pooled.vectors))
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        logprobs = self._logprobs.to_host() if self._logprobs is not None else None
        pooled = self._pooled
        return StepResult(
            self._step,
            self._tokens.numpy(),
            np.ones(len(self._tokens), np.int32),
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
