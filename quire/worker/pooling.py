"""Hidden states of whole prompts as one vector each, for embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import AddedRow, Int32Array, StepPlan


@dataclass(slots=True)
class PooledTensors:
    rows: Int32Array
    vectors: Tensor
    """float32 [rows, hidden]."""


@dataclass(slots=True)
class PooledRow:
    """A row whose prompt, which may be spread over several steps, becomes a vector."""

    added: AddedRow
    total: Tensor | None = None
    """Sum of the hidden states so far, where their mean is wanted."""


def pool(rows: dict[int, PooledRow], plan: StepPlan, hidden: Tensor | None) -> PooledTensors | None:
    """Take in a step's hidden states [tokens, hidden]; returns vectors of complete prompts, whose
    rows are taken out of `rows`."""
    assert hidden is not None, "steps with rows to pool run outside of graphs"
    done: list[int] = []
    vectors: list[Tensor] = []
    ends = np.cumsum(plan.num_new_tokens)
    for row, end, count, samples in zip(
        plan.rows.tolist(),
        ends.tolist(),
        plan.num_new_tokens.tolist(),
        plan.samples.tolist(),
        strict=True,
    ):
        pooled = rows.get(row)
        if pooled is None:
            continue
        if pooled.added.pooling == "mean":
            pooled.total = _add(pooled.total, hidden[end - count : end])
        if samples:
            done.append(row)
            vectors.append(_vector(pooled, hidden[end - 1]))
            del rows[row]
    if not done:
        return None
    return PooledTensors(np.array(done, np.int32), torch.stack(vectors))


def _add(total: Tensor | None, hidden: Tensor) -> Tensor:
    """The sum of `hidden` [tokens, hidden], and of `total`."""
    if hidden.is_cuda:
        part = hidden.sum(0, dtype=torch.float32)
        return part if total is None else total + part
    if total is None:
        total = torch.zeros(hidden.shape[1])
    for line in hidden.unbind(0):  # in this order however the prompt is cut into chunks
        total += line
    return total


def _vector(pooled: PooledRow, last: Tensor) -> Tensor:
    if pooled.total is None:
        return last.float()
    return pooled.total / pooled.added.num_prompt_tokens
