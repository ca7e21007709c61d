"""`Sampler`: the logits of a step in, one token per line out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.logprobs import Logprobs, LogprobTensors
from quire.decoding.masks import AllowedTokens, BadWords, LogitBias, MaskTensors, MinTokens
from quire.decoding.penalties import Penalties
from quire.decoding.rows import Batch, RowColumns, RowSet
from quire.kernels import dispatch
from quire.kernels.torch.sampling import Kinds, RowSettings, merge_scratch
from quire.protocol.plan import AddedRow, Int32Array, empty_ints


class RowSampling:
    """Temperature, seed, top_k, top_p and min_p of each row, and sampling by them."""

    def __init__(self, vocab_size: int, columns: RowColumns, num_tokens: Tensor) -> None:
        self._vocab_size = vocab_size
        self._columns = columns
        self._num_tokens = num_tokens
        self.drawing = RowSet(columns.max_rows)
        self._filtering = RowSet(columns.max_rows)
        self._searching = RowSet(columns.max_rows)
        self._temperature = columns.floats()
        self._seed_low = columns.integers()
        self._seed_high = columns.integers()
        self._top_k = columns.integers()
        self._top_p = columns.floats()
        self._log_min_p = columns.floats()
        self._settings = RowSettings(
            self._temperature.device,
            self._seed_low.device,
            self._seed_high.device,
            self._top_k.device,
            self._top_p.device,
            self._log_min_p.device,
            merge_scratch(columns.max_rows, columns.device),
        )
        self._line_scratch = self._settings.scratch

    def add(self, added: AddedRow) -> None:
        params, row = added.params, added.row
        # The highest logit alone is kept by top_k=1: drawing could only tell exact ties apart.
        if params.is_greedy or params.top_k == 1:
            self._temperature.host[row] = 0.0
            return
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        self._temperature.host[row] = params.temperature
        self._seed_low.host.view("uint32")[row] = added.seed & 0xFFFFFFFF
        self._seed_high.host.view("uint32")[row] = (added.seed >> 32) & 0xFFFFFFFF
        self._top_k.host[row] = top_k
        self._top_p.host[row] = params.top_p
        self._log_min_p.host[row] = math.log(params.min_p) if params.min_p else -math.inf
        self.drawing.add(row)
        if top_k or params.top_p < 1.0:
            self._searching.add(row)
        if top_k or params.top_p < 1.0 or params.min_p:
            self._filtering.add(row)

    def remove(self, row: int) -> None:
        for rows in (self.drawing, self._filtering, self._searching):
            rows.discard(row)

    def apply(self, logits: Tensor, batch: Batch) -> Tensor:
        """One token per line of `logits` [S, V], which are left as they are; int32 [S]."""
        kinds = Kinds(
            batch.has(self.drawing), batch.has(self._filtering), batch.has(self._searching)
        )
        if batch.offsets is None:
            return dispatch.sample_tokens(
                logits, batch.rows, self._num_tokens, self._settings, kinds
            )
        if len(batch) > self._line_scratch.shape[1]:
            self._line_scratch = merge_scratch(2 * len(batch), logits.device)
        positions = batch.all_lines.num_known(self._num_tokens)
        return self._sample_lines(logits, batch.rows, positions, kinds, self._line_scratch)

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor, kinds: Kinds) -> Tensor:
        """The tokens at these positions of `rows`, of which there are no more than the table has.
        The same tensors are read each time: a CUDA graph may have it."""
        return self._sample_lines(logits, rows, positions, kinds, self._settings.scratch)

    def kinds(self, host_rows: NDArray[Any]) -> Kinds:
        """What these rows do, told apart only as far as that saves much."""
        draws, filters = (
            len(rows) > 0 and bool(rows.members[host_rows].any())
            for rows in (self.drawing, self._filtering)
        )
        return Kinds(draws, filters, filters)

    def _sample_lines(
        self, logits: Tensor, rows: Tensor, positions: Tensor, kinds: Kinds, scratch: Tensor
    ) -> Tensor:
        """Each line is sampled as if it were a row of its own."""
        taken = self._columns.take(rows)
        settings = RowSettings(
            self._temperature.of(taken),
            self._seed_low.of(taken),
            self._seed_high.of(taken),
            self._top_k.of(taken),
            self._top_p.of(taken),
            self._log_min_p.of(taken),
            scratch,
        )
        numbers = torch.arange(len(rows), device=rows.device)
        return dispatch.sample_tokens(logits, numbers, positions, settings, kinds)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Sample once in every way from logits as they come and as they are when edited."""
        rows = torch.zeros(1, dtype=torch.int64, device=self._num_tokens.device)
        for kind in {dtype, torch.float32}:
            logits = torch.zeros((1, self._vocab_size), dtype=kind, device=rows.device)
            for flags in ((False,) * 3, (True, False, False), (True, True, False), (True,) * 3):
                args = (logits, rows, self._num_tokens, self._settings, Kinds(*flags))
                dispatch.sample_tokens(*args)


@dataclass
class Sampled:
    """What `Sampler.sample` made, still on the device."""

    tokens: Tensor
    """int32 [S]."""
    logprobs: LogprobTensors | None


class Sampler:
    """Samples tokens for the rows of a row table.

    `add`, `cut` and `remove` follow the rows' requests; `sample` samples one token for each given
    row, at the position `num_tokens[row]`; the caller then writes the tokens into the table and
    tells `appended`. On a GPU `sample` never waits for the device.

    A row whose drafts are verified is given several times, one line after the other. Its drafts lie
    behind its tokens in the table, and each line samples what would follow if those before it were
    known: with their penalties, their position's noise and so on.

    Order: grammars, allowed ids, bad words, min_tokens, logit_bias, repetition, frequency,
    presence; then the highest logit if greedy, else temperature, min_p, top_k, top_p and a random
    draw. Logprobs are those of the logits as they came.
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
        self._sampling = RowSampling(vocab_size, columns, num_tokens)
        self._penalties = Penalties(vocab_size, columns, token_ids, num_tokens)
        self._logprobs = Logprobs(vocab_size, columns)
        self._edits = (
            AllowedTokens(vocab_size, columns),
            BadWords(vocab_size, columns, token_ids, num_tokens),
            MinTokens(vocab_size, columns, num_tokens),
            LogitBias(vocab_size, columns),
            self._penalties,
        )
        self._constrained = RowSet(max_rows)
        """Rows whose grammars bring masks."""
        self._batch: Batch | None = None

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        """A request takes `added.row`; `token_ids` are all its known tokens, also forked ones."""
        self.remove(added.row)
        self._sampling.add(added)
        if added.params.edits_logits:
            for edit in self._edits:
                edit.add(added, token_ids)
        if added.num_logprobs >= 0:
            self._logprobs.add(added)
        if added.params.structured_outputs is not None:
            self._constrained.add(added.row)
        self._columns.touch(added.row)

    def remove(self, row: int) -> None:
        """The row's request is gone; harmless if there is none."""
        self._sampling.remove(row)
        for feature in (*self._edits, self._logprobs):
            if row in feature.users:
                feature.remove(row)
        self._constrained.discard(row)
        self._columns.touch(row)
        self._batch = None

    def cut(self, row: int, num_tokens: int) -> None:
        """The row was cut back to its first `num_tokens` tokens, which are in the table."""
        self._penalties.cut(row, num_tokens)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the GPU kernels for logits of this type; no request may be there yet."""
        self._sampling.warm_up(dtype)
        self._penalties.warm_up()
        for kind in {dtype, torch.float32}:
            self._warm_up_masks(kind)

    def _warm_up_masks(self, dtype: torch.dtype) -> None:
        """One mask, as the first request with a grammar brings it."""
        device = self._columns.device
        masks = MaskTensors(np.zeros(1, np.int32), -(-self._vocab_size // 32), device)
        masks.apply(torch.zeros((1, self._vocab_size), dtype=dtype, device=device))

    def takes_argmax(self, host_rows: NDArray[Any]) -> bool:
        """Whether the highest logit is all that `sample` would look for in the lines of these rows.
        It follows from what was added, on all ranks alike."""
        users = (edit.users for edit in self._edits)
        others = (self._sampling.drawing, self._logprobs.users, self._constrained, *users)
        return not any(len(rows) and rows.members[host_rows].any() for rows in others)

    def constrained(self, host_rows: NDArray[Any]) -> Int32Array:
        """Which of these rows have a grammar."""
        if not len(self._constrained):
            return empty_ints()
        return np.flatnonzero(self._constrained.members[host_rows]).astype(np.int32)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: NDArray[Any],
        masks: MaskTensors | None = None,
        offsets: Tensor | None = None,
    ) -> Sampled:
        """Sample the next token of each of `rows` (integers [S]; `host_rows` the same on the host).
        Where a row is given several times, `offsets` (int32 [S]) count the drafts before each line.

        `logits` [S, vocab_size] may be of any floating type. `masks` are what grammars allow; they
        may be applied to the logits in place, which are otherwise left as they are.
        """
        assert logits.shape == (len(host_rows), self._vocab_size), tuple(logits.shape)
        self._columns.flush()
        batch = self._batch
        if batch is None or not np.array_equal(batch.host_rows, host_rows):
            batch = self._batch = Batch(rows, host_rows, offsets)
        edited = logits
        edits = [edit for edit in self._edits if batch.has(edit.users)]
        if edits or (masks is not None and batch.has(self._logprobs.users)):
            edited = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            edited.copy_(logits)
        if masks is not None:
            masks.apply(edited)
        for edit in edits:
            edit.apply(edited, batch)
        tokens = self._sampling.apply(edited, batch)
        wants_logprobs = batch.has(self._logprobs.users)
        return Sampled(
            tokens, self._logprobs.apply(logits, tokens, batch) if wants_logprobs else None
        )

    def draft(
        self, logits: Tensor, rows: Tensor, host_rows: NDArray[Any], num_drafts: int
    ) -> Tensor:
        """The token that each of `rows` would sample from a draft model's logits if so many drafts
        before it were known; int32 [S]. Penalties count known tokens alone."""
        self._columns.flush()
        offsets = torch.full_like(rows, num_drafts, dtype=torch.int32)
        batch = Batch(rows, host_rows, offsets)
        edits = [edit for edit in self._edits if batch.has(edit.users)]
        if edits:
            logits = logits.float().clone()
        for edit in edits:
            edit.apply(logits, batch)
        return self._sampling.apply(logits, batch)

    def begin_drafts(self, host_rows: NDArray[Any]) -> Kinds | None:
        """How `draw` is to draw for these rows, whose settings are brought to the device; None
        where their logits are edited first, which `draft` does."""
        self._columns.flush()
        if any(len(edit.users) and edit.users.members[host_rows].any() for edit in self._edits):
            return None
        return self._sampling.kinds(host_rows)

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor, kinds: Kinds) -> Tensor:
        """What `draft` draws at these positions (int32 [S]) where no logits are edited. Nothing is
        asked of the host, so that a CUDA graph may have it."""
        return self._sampling.draw(logits, rows, positions, kinds)

    def appended(self, rows: Tensor, tokens: Tensor, accepted: Tensor | None = None) -> None:
        """`tokens[i]` was generated for `rows[i]` (a row may occur more than once), or only those
        that are `accepted` (bool)."""
        self._columns.flush()
        if self._penalties.users:
            self._penalties.appended(rows, tokens, accepted)
