"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.decoding.rows import Batch, Lines, RowColumns, Slots, fit, upload
from quire.kernels import dispatch
from quire.kernels.torch.penalties import PenaltySettings
from quire.protocol.plan import AddedRow, Int32Array


class Penalties:
    """Counts each token's uses in the rows that are penalised, and lowers its logit accordingly.

    `repetition_penalty` looks at prompt and generated tokens, the others at generated ones. Drafts
    before a line count as generated there.
    """

    def __init__(
        self, vocab_size: int, columns: RowColumns, token_ids: Tensor, num_tokens: Tensor
    ) -> None:
        self._columns = columns
        self._token_ids = token_ids
        self._num_tokens = num_tokens
        self._num_prompt_tokens = np.zeros(columns.max_rows, np.int32)
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
        if not params.penalizes:
            return
        self._repetition.host[row] = params.repetition_penalty
        self._frequency.host[row] = params.frequency_penalty
        self._presence.host[row] = params.presence_penalty
        self._num_prompt_tokens[row] = added.num_prompt_tokens
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

    def cut(self, row: int, num_tokens: int) -> None:
        """Count only the first `num_tokens` tokens of a row from now on."""
        if row not in self.users:
            return
        uses = self._uses[int(self._slots.column.host[row])]
        generated = self._token_ids[row, int(self._num_prompt_tokens[row]) : num_tokens].long()
        uses.bitwise_and_(1)
        uses.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))

    def appended(self, rows: Tensor, tokens: Tensor, accepted: Tensor | None = None) -> None:
        """Count generated tokens, or those of them that were `accepted`."""
        slots = self._settings.slot
        if accepted is not None:
            # Each token has a slot of its own; those of others are counted in no row's.
            slots = slots.index_select(0, rows) * accepted
            rows = torch.arange(len(rows), device=rows.device)
        dispatch.count_uses(self._uses, rows, tokens, slots)

    def warm_up(self) -> None:
        """Run both kernels for row 0, which has no penalties yet."""
        rows = torch.zeros(1, dtype=torch.int64, device=self._uses.device)
        logits = torch.zeros((1, self._uses.shape[1]), dtype=torch.float32, device=rows.device)
        dispatch.penalize(logits, rows, self._uses, self._settings)
        for index in (rows, rows.int()):
            dispatch.count_uses(self._uses, index, rows.int(), self._settings.slot)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        lines = None if batch.offsets is None else batch.lines(self.users)
        if lines is None:
            dispatch.penalize(logits, batch.rows, self._uses, self._settings)
            return
        drafts, penalized = self._penalize_drafts(logits, lines, batch.max_drafts)
        dispatch.penalize(logits, batch.rows, self._uses, self._settings)
        # A token that is drafted twice has the same logit in both places.
        logits[lines.numbers[:, None], drafts] = penalized

    def _penalize_drafts(
        self, logits: Tensor, lines: Lines, max_drafts: int
    ) -> tuple[Tensor, Tensor]:
        """All drafts of each line's row [n, max_drafts], and what their logits become when those
        before the line count as generated. The logits stay as they are."""
        assert lines.offsets is not None
        column = torch.arange(max_drafts, device=logits.device)
        places = self._num_tokens[lines.rows].long()[:, None] + column
        # A row near its end has fewer drafts; what is looked at instead is before no line.
        places.clamp_max_(self._token_ids.shape[1] - 1)
        drafts = self._token_ids[lines.rows[:, None], places].long()
        is_before = column < lines.offsets[:, None]
        repeats = ((drafts[:, :, None] == drafts[:, None, :]) & is_before[:, None, :]).sum(-1)
        uses = self._uses[self._slots.of(lines.rows)[:, None], drafts] + 2 * repeats.int()
        penalized = logits[lines.numbers[:, None], drafts]
        # As if the drafts were the vocabulary, and each line a row with a slot of its own.
        taken = self._columns.take(lines.rows)
        index = torch.arange(len(lines), device=logits.device)
        settings = PenaltySettings(
            index.int() + 1,
            self._repetition.of(taken),
            self._frequency.of(taken),
            self._presence.of(taken),
        )
        dispatch.penalize(penalized, index, F.pad(uses, (0, 0, 1, 0)), settings)
        return drafts, penalized
