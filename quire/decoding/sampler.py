"""`Sampler`: the logits of a step in, one token per line out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.choice import Choice
from quire.decoding.grammar import MaskTensors
from quire.decoding.logprobs import Logprobs, LogprobTensors
from quire.decoding.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from quire.decoding.penalties import Penalties
from quire.decoding.rows import Batch, RowColumns
from quire.protocol.plan import AddedRow, Int32Array


@dataclass
class Sampled:
    """What `Sampler.sample` made, still on the device."""

    tokens: Tensor
    """int32 [S]."""
    logprobs: LogprobTensors | None


class Sampler:
    """Chooses tokens for the rows of a request table.

    `add`, `cut` and `remove` follow the rows' requests; `sample` chooses one token for each given
    row, at the position `num_tokens[row]`; the caller then writes the tokens into the table and
    tells `appended`. On a GPU `sample` never waits for the device.

    A row whose drafts are verified is given several times, one line after the other. Its drafts lie
    behind its tokens in the table, and each line samples what would follow if those before it were
    known: with their penalties, their position's noise and so on.

    Order: grammars, allowed ids, bad words, min_tokens, logit_bias, repetition, frequency,
    presence; then the highest score if greedy, else temperature, min_p, top_k, top_p and a random
    choice. Logprobs are those of the logits as they came.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device | str,
        token_ids: Tensor,
        num_tokens: Tensor,
    ) -> None:
        """`token_ids` int32 [max_rows, max_len] and `num_tokens` int32 [max_rows] stay live."""
        columns = RowColumns(max_rows, torch.device(device))
        self._vocab_size = vocab_size
        self._columns = columns
        self._choice = Choice(vocab_size, columns, num_tokens)
        self._penalties = Penalties(vocab_size, columns, token_ids, num_tokens)
        self._logprobs = Logprobs(vocab_size, columns)
        self._edits = (
            AllowedTokens(vocab_size, columns),
            BadWords(vocab_size, columns, token_ids, num_tokens),
            MinTokens(vocab_size, columns, num_tokens),
            LogitBias(vocab_size, columns),
            self._penalties,
        )
        self._batch: Batch | None = None

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        """A request takes `added.row`; `token_ids` are all its known tokens, also forked ones."""
        self.remove(added.row)
        self._choice.add(added)
        for edit in self._edits:
            edit.add(added, token_ids)
        self._logprobs.add(added)
        self._columns.touch(added.row)

    def remove(self, row: int) -> None:
        """The row's request is gone; harmless if there is none."""
        self._choice.remove(row)
        for edit in self._edits:
            edit.remove(row)
        self._logprobs.remove(row)
        self._columns.touch(row)
        self._batch = None

    def cut(self, row: int, num_tokens: int) -> None:
        """The row was cut back to its first `num_tokens` tokens, which are in the table."""
        self._penalties.cut(row, num_tokens)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the GPU kernels for logits of this type; no request may be there yet."""
        self._choice.warm_up(dtype)
        self._penalties.warm_up()
        for kind in {dtype, torch.float32}:
            self._warm_up_masks(kind)

    def _warm_up_masks(self, dtype: torch.dtype) -> None:
        """One mask, as the first request with a grammar brings it."""
        device = self._columns.device
        masks = MaskTensors(np.zeros(1, np.int32), -(-self._vocab_size // 32), device)
        masks.apply(torch.zeros((1, self._vocab_size), dtype=dtype, device=device))

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: NDArray[Any],
        masks: MaskTensors | None = None,
        offsets: Tensor | None = None,
    ) -> Sampled:
        """Choose the next token of each of `rows` (integers [S]; `host_rows` the same on the host).
        Where a row is given several times, `offsets` (int32 [S]) count the drafts before each line.

        `logits` [S, vocab_size] may be of any floating type. `masks` are what grammars allow; they
        may be applied to the logits in place, which are otherwise left as they are.
        """
        assert logits.shape == (len(host_rows), self._vocab_size), tuple(logits.shape)
        self._columns.flush()
        batch = self._batch
        if batch is None or not np.array_equal(batch.host_rows, host_rows):
            batch = self._batch = Batch(rows, host_rows, offsets)
        scores = logits
        edits = [edit for edit in self._edits if batch.has(edit.users)]
        if edits or (masks is not None and batch.has(self._logprobs.users)):
            scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            scores.copy_(logits)
        if masks is not None:
            masks.apply(scores)
        for edit in edits:
            edit.apply(scores, batch)
        tokens = self._choice.apply(scores, batch)
        return Sampled(tokens, self._logprobs.apply(logits, tokens, batch))

    def appended(self, rows: Tensor, tokens: Tensor, accepted: Tensor | None = None) -> None:
        """`tokens[i]` was generated for `rows[i]` (a row may occur more than once), or only those
        that are `accepted` (bool)."""
        self._columns.flush()
        self._penalties.appended(rows, tokens, accepted)

    def prompt_logprobs(
        self, row: int, logits: Tensor, target_ids: Tensor, positions: Int32Array
    ) -> LogprobTensors:
        """Logprobs of prompt tokens `target_ids` at `positions`, which `logits` [n, V] predict."""
        return self._logprobs.prompt(row, logits, target_ids, positions)
