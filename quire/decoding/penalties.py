"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.decoding.rows import Batch, RowColumns, RowSet, Slots, fit, upload
from quire.protocol.plan import AddedRow, Int32Array

# Bounds the temporaries; small enough for a CPU's cache.
MAX_ELEMENTS = 1 << 18
MAX_ELEMENTS_ON_GPU = 1 << 22


class Penalties:
    """Counts each token's uses in the rows that are penalised, and lowers its score accordingly.

    `repetition_penalty` looks at prompt and generated tokens: positive scores are divided by it,
    others multiplied. Then `frequency_penalty` is subtracted once per generated use, and
    `presence_penalty` once if there is any.
    """

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self.users = RowSet(columns.max_rows)
        self._repeating = RowSet(columns.max_rows)
        self._counting = RowSet(columns.max_rows)
        self._slots = Slots(columns)
        self._repetition = columns.floats()
        self._frequency = columns.floats()
        self._presence = columns.floats()
        # [slot, token]: twice the number of generated uses, plus one if the prompt uses the token.
        self._uses = torch.zeros((0, vocab_size), dtype=torch.int32, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        params, row = added.params, added.row
        repeating = params.repetition_penalty != 1.0
        counting = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        if not repeating and not counting:
            return
        self.users.add(row)
        if repeating:
            self._repeating.add(row)
        if counting:
            self._counting.add(row)
        self._repetition.host[row] = params.repetition_penalty
        self._frequency.host[row] = params.frequency_penalty
        self._presence.host[row] = params.presence_penalty
        slot = self._slots.take(row)
        self._uses = fit(self._uses, (self._slots.capacity, self._uses.shape[1]), 0)
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
        if row in self.users:
            self._slots.release(row)
        for rows in (self.users, self._repeating, self._counting):
            rows.discard(row)

    def appended(self, rows: Tensor, tokens: Tensor) -> None:
        """Count generated tokens; rows without a slot count in the one that nobody reads."""
        if not self.users:
            return
        flat = self._slots.of(rows) * self._uses.shape[1] + tokens
        self._uses.view(-1).index_add_(0, flat, torch.full_like(flat, 2, dtype=torch.int32))

    def apply(self, scores: Tensor, batch: Batch) -> None:
        on_gpu = scores.device.type != "cpu"
        max_lines = max(1, (MAX_ELEMENTS_ON_GPU if on_gpu else MAX_ELEMENTS) // scores.shape[1])
        if (lines := batch.lines(self._repeating)) is not None:
            for piece in lines.pieces(max_lines):
                part = piece.take(scores)
                seen = self._uses.index_select(0, self._slots.of(piece.rows)) != 0
                factor = torch.where(seen, self._repetition.device[piece.rows][:, None], 1.0)
                # Not torch.where: on a CPU it is slow where signs alternate.
                positive, negative = part.clamp_min(0).div_(factor), part.clamp_max(0).mul_(factor)
                piece.put(scores, torch.add(positive, negative, out=part))
        if (lines := batch.lines(self._counting)) is not None:
            for piece in lines.pieces(max_lines):
                part = piece.take(scores)
                counts = (self._uses.index_select(0, self._slots.of(piece.rows)) >> 1).float()
                part -= counts * self._frequency.device[piece.rows][:, None]
                part -= counts.clamp_max_(1) * self._presence.device[piece.rows][:, None]
                piece.put(scores, part)
