"""Log-probabilities of sampled and of prompt tokens, from the model's logits as they came."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.decoding.rows import Batch, Lines, RowColumns, RowSet, Slots, fit, upload
from quire.kernels import dispatch
from quire.protocol.plan import AddedRow, Int32Array, LogprobArrays

# Bounds the float32 temporaries [MAX_LINES, vocab_size].
MAX_LINES = 256


@dataclass
class LogprobTensors:
    """`LogprobArrays` still on the device."""

    index: Int32Array
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_ids, self.logprobs, self.ranks

    def to_host(self) -> LogprobArrays:
        """Copy to the host, waiting for the device."""
        return LogprobArrays(self.index, *(tensor.cpu().numpy() for tensor in self.tensors))


@dataclass(frozen=True)
class Wanted:
    """Which tokens to report beside the sampled one, for some lines."""

    max_top: int
    """Most likely tokens of the line that wants most of them."""
    num_top: Tensor
    """int32 [n]: most likely tokens wanted by each line."""
    named: Tensor | None = None
    """int32 [n, m]: tokens asked for by id, -1 as padding."""


def _pad(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)


def _reported_ids(top: Tensor, wanted: Wanted) -> Tensor:
    """[n, k] token ids beside the sampled one, -1 where a line wants fewer than all of `top`."""
    if wanted.max_top:
        column = torch.arange(wanted.max_top, device=top.device)
        top = top.masked_fill(column >= wanted.num_top[:, None], -1)
    if wanted.named is None:
        return top
    width = max(top.shape[1], wanted.named.shape[1])
    return torch.maximum(_pad(top, width), _pad(wanted.named.long(), width))


def measure(logits: Tensor, tokens: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [n, 1 + k], their logprobs, and the ranks [n] of `tokens` given logits [n, V]."""
    raw = logits.float()
    summary = dispatch.summarize(raw, tokens, wanted.max_top)
    ids = torch.cat([tokens[:, None].long(), _reported_ids(summary.top_ids, wanted)], -1)
    logprobs = raw.gather(1, ids.clamp_min(0)) - summary.best - summary.log_total
    logprobs.masked_fill_(ids < 0, -math.inf)
    return ids.int(), logprobs, summary.ranks


def measure_prompt(
    added: AddedRow, logits: Tensor, target_ids: Tensor, positions: Int32Array
) -> LogprobTensors:
    """Logprobs of prompt tokens `target_ids` [n] at `positions`, which the logits [n, V] predict; a
    caller with more than `MAX_LINES` of them asks in pieces."""
    max_top, named = min(added.num_prompt_logprobs, logits.shape[1]), None
    if (wanted_ids := added.params.prompt_logprob_token_ids) is not None:
        ids = upload(np.array([wanted_ids], np.int32), logits.device)
        max_top, named = 0, ids.expand(len(logits), -1)
    num_top = torch.full((len(logits),), max_top, dtype=torch.int32, device=logits.device)
    measured = measure(logits, target_ids, Wanted(max_top, num_top, named))
    return LogprobTensors(np.asarray(positions, np.int32), *measured)


class Logprobs:
    """What each row wants reported of sampled tokens."""

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self.users = RowSet(columns.max_rows)
        self._vocab_size = vocab_size
        self._num_top = columns.integers()
        self._slots = Slots(columns)
        self._named = torch.full((0, 1), -1, dtype=torch.int32, device=columns.device)

    def add(self, added: AddedRow) -> None:
        row, named = added.row, added.params.logprob_token_ids
        self.users.add(row)
        if named is None:
            self._num_top.host[row] = min(added.num_logprobs, self._vocab_size)
        else:
            self._num_top.host[row] = 0
            slot = self._slots.take(row)
            self._named = fit(self._named, (slot + 1, len(named)), -1)
            ids = np.full(self._named.shape[1], -1, np.int32)
            ids[: len(named)] = named
            self._named[slot] = upload(ids, self._named.device)

    def remove(self, row: int) -> None:
        self._slots.release(row)
        self.users.discard(row)

    def apply(self, logits: Tensor, tokens: Tensor, batch: Batch) -> LogprobTensors | None:
        """Logprobs of the sampled `tokens` in the lines that want them."""
        if (lines := batch.lines(self.users)) is None:
            return None
        max_top = int(self._num_top.host[lines.host_rows].max())
        any_named = batch.has(self._slots.users)
        parts = [
            measure(piece.take(logits), piece.take(tokens), self._wanted(piece, max_top, any_named))
            for piece in lines.pieces(MAX_LINES)
        ]
        token_ids, logprobs, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
        return LogprobTensors(lines.host_numbers.astype(np.int32), token_ids, logprobs, ranks)

    def _wanted(self, lines: Lines, max_top: int, any_named: bool) -> Wanted:
        named = self._named.index_select(0, self._slots.of(lines.rows)) if any_named else None
        return Wanted(max_top, self._num_top.device[lines.rows], named)
