"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.decoding.rows import Batch, RowColumns, Slots, fit, upload
from quire.kernels import dispatch
from quire.kernels.torch.penalties import PenaltySettings
from quire.protocol.plan import AddedRow, Int32Array


class Penalties:
    """Counts each token's uses in the rows that are penalised, and lowers its score accordingly.

    `repetition_penalty` looks at prompt and generated tokens, the others at generated ones.
    """

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self._slots = Slots(columns)
        self.users = self._slots.users
        self._repetition = columns.floats()
        self._frequency = columns.floats()
        self._presence = columns.floats()
        self._settings = PenaltySettings(
            self._slots.column.device,
            self._repetition.device,
            self._frequency.device,
            self._presence.device,
        )
        # [slot, token]: twice the number of generated uses, plus one if the prompt uses the token.
        self._uses = torch.zeros((0, vocab_size), dtype=torch.int32, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        params, row = added.params, added.row
        amounts = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if amounts == (1.0, 0.0, 0.0):
            return
        self._repetition.host[row] = params.repetition_penalty
        self._frequency.host[row] = params.frequency_penalty
        self._presence.host[row] = params.presence_penalty
        slot = self._slots.take(row)
        self._uses = fit(self._uses, (slot + 1, self._uses.shape[1]), 0)
        prompt, generated = np.split(token_ids, [added.num_prompt_tokens])
        self._count(slot, prompt, generated)

    def _count(self, slot: int, prompt: Int32Array, generated: Int32Array) -> None:
        uses = 2 * np.bincount(generated, minlength=self._uses.shape[1])
        uses[prompt] |= 1
        used = np.flatnonzero(uses)
        self._uses[slot].zero_()
        entries = upload(np.stack([used, uses[used]]), self._uses.device)
        self._uses[slot].index_copy_(0, entries[0], entries[1].int())

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def appended(self, rows: Tensor, tokens: Tensor) -> None:
        """Count generated tokens."""
        if self.users:
            dispatch.count_uses(self._uses, rows, tokens, self._settings.slot)

    def warm_up(self) -> None:
        """Run both kernels for row 0, which has no penalties yet."""
        rows = torch.zeros(1, dtype=torch.int64, device=self._uses.device)
        scores = torch.zeros((1, self._uses.shape[1]), dtype=torch.float32, device=rows.device)
        dispatch.penalize(scores, rows, self._uses, self._settings)
        for index in (rows, rows.int()):
            dispatch.count_uses(self._uses, index, rows.int(), self._settings.slot)

    def apply(self, scores: Tensor, batch: Batch) -> None:
        dispatch.penalize(scores, batch.rows, self._uses, self._settings)
