"""Forbidden and favoured tokens: allowed ids, bad words, min_tokens, logit_bias and the masks of
grammars.

All but allowed ids and masks keep short lists of tokens per row, padded to a common width, and
change only the listed logits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.decoding.rows import Batch, RowColumns, Slots, fit, upload
from quire.kernels import dispatch
from quire.protocol.plan import AddedRow, Int32Array, TokenMasks

# Contents of a bad word's prefix; token ids are never negative.
ANY_TOKEN = -1
NO_TOKEN = -2
BEFORE_START = -3


def _forbid(where: Tensor) -> Tensor:
    """What to add to a logit: minus infinity where `where`, else nothing."""
    return torch.zeros_like(where, dtype=torch.float32).masked_fill_(where, -math.inf)


class AllowedTokens:
    """`allowed_token_ids`: every other token is forbidden."""

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self._slots = Slots(columns)
        self.users = self._slots.users
        self._forbidden = torch.ones((0, vocab_size), dtype=torch.bool, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        allowed = added.params.allowed_token_ids
        if allowed is None:
            return
        slot = self._slots.take(added.row)
        self._forbidden = fit(self._forbidden, (slot + 1, self._forbidden.shape[1]), 1)
        self._forbidden[slot].fill_(True)
        ids = upload(np.array(allowed, np.int64), self._forbidden.device)
        self._forbidden[slot].index_fill_(0, ids, False)

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        if (lines := batch.lines(self.users)) is None:
            return
        part = lines.take(logits)
        forbidden = self._forbidden.index_select(0, self._slots.of(lines.rows))
        lines.put(logits, part.masked_fill_(forbidden, -math.inf))


class BadWords:
    """`bad_words`: a word's last token is forbidden where the tokens before it are the tail."""

    def __init__(
        self, vocab_size: int, columns: RowColumns, token_ids: Tensor, num_tokens: Tensor
    ) -> None:
        self._token_ids = token_ids
        self._num_tokens = num_tokens
        self._slots = Slots(columns)
        self.users = self._slots.users
        # [slot, word, 1 + p]: the word's last token, then the tokens before it, nearest first, then
        # ANY_TOKEN. A prefix of NO_TOKEN never matches and marks an unused entry.
        self._words = torch.empty((0, 1, 2), dtype=torch.int32, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        words = [word for word in added.params.bad_words_token_ids if word]
        if not words:
            return
        slot = self._slots.take(added.row)
        length = max(2, *map(len, words))
        self._fit((slot + 1, len(words), length))
        entries = np.full(self._words.shape[1:], ANY_TOKEN, np.int32)
        entries[len(words) :] = NO_TOKEN
        entries[len(words) :, 0] = 0
        for entry, word in zip(entries, words, strict=False):
            entry[: len(word)] = word[::-1]
        self._words[slot] = upload(entries, self._words.device)

    def _fit(self, shape: tuple[int, int, int]) -> None:
        """Make room, keeping unused words unmatched and longer prefixes open at their far end."""
        slots, words, length = shape
        self._words = fit(self._words, (*self._words.shape[:2], length), ANY_TOKEN)
        had_words = self._words.shape[1]
        self._words = fit(self._words, (slots, words, self._words.shape[2]), NO_TOKEN)
        self._words[:, had_words:, 0] = 0

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        if (lines := batch.lines(self.users)) is None:
            return
        words = self._words.index_select(0, self._slots.of(lines.rows))
        back = torch.arange(1, words.shape[2], device=logits.device)
        at = lines.num_known(self._num_tokens)[:, None].long() - back
        tail = self._token_ids[lines.rows[:, None], at.clamp_min(0)]
        tail = tail.masked_fill(at < 0, BEFORE_START)[:, None, :]
        prefixes = words[:, :, 1:]
        matches = ((prefixes == tail) | (prefixes == ANY_TOKEN)).all(-1)
        lines.add_at(logits, words[:, :, 0], _forbid(matches))


class MinTokens:
    """`min_tokens`: ids that would end a request are forbidden until it has generated enough."""

    def __init__(self, vocab_size: int, columns: RowColumns, num_tokens: Tensor) -> None:
        self._num_tokens = num_tokens
        self._until = columns.integers()
        self._slots = Slots(columns)
        self.users = self._slots.users
        # [slot, j]: ids that end the request, padded with -1.
        self._ids = torch.empty((0, 1), dtype=torch.int32, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        until = added.num_prompt_tokens + added.params.min_tokens
        if len(token_ids) >= until or not added.stop_token_ids:
            return
        self._until.host[added.row] = until
        slot = self._slots.take(added.row)
        self._ids = fit(self._ids, (slot + 1, len(added.stop_token_ids)), -1)
        ids = np.full(self._ids.shape[1], -1, np.int32)
        ids[: len(added.stop_token_ids)] = added.stop_token_ids
        self._ids[slot] = upload(ids, self._ids.device)

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        if (lines := batch.lines(self.users)) is None:
            return
        ids = self._ids.index_select(0, self._slots.of(lines.rows))
        early = lines.num_known(self._num_tokens) < self._until.device[lines.rows]
        lines.add_at(logits, ids.clamp_min(0), _forbid(early[:, None] & (ids >= 0)))


class LogitBias:
    """`logit_bias`: a number added to the logits of some tokens."""

    def __init__(self, vocab_size: int, columns: RowColumns) -> None:
        self._slots = Slots(columns)
        self.users = self._slots.users
        self._ids = torch.empty((0, 1), dtype=torch.int32, device=columns.device)
        self._amounts = torch.empty((0, 1), dtype=torch.float32, device=columns.device)

    def add(self, added: AddedRow, token_ids: Int32Array) -> None:
        bias = added.params.logit_bias
        if not bias:
            return
        slot = self._slots.take(added.row)
        shape = (slot + 1, len(bias))
        self._ids = fit(self._ids, shape, 0)
        self._amounts = fit(self._amounts, shape, 0.0)
        ids = np.zeros(self._ids.shape[1], np.int32)
        amounts = np.zeros(self._ids.shape[1], np.float32)
        ids[: len(bias)], amounts[: len(bias)] = list(bias.keys()), list(bias.values())
        self._ids[slot] = upload(ids, self._ids.device)
        self._amounts[slot] = upload(amounts, self._ids.device)

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        if (lines := batch.lines(self.users)) is None:
            return
        slots = self._slots.of(lines.rows)
        lines.add_at(logits, self._ids.index_select(0, slots), self._amounts.index_select(0, slots))


class MaskTensors(TokenMasks):
    """Masks of grammars, in memory that the device copies from: the host fills in `bits`, then
    `apply` sends them once. On a CPU they can be filled in again for another step that has the same
    lines."""

    def __init__(self, lines: Int32Array, num_words: int, device: torch.device) -> None:
        # One array, the lines last, so that one copy takes all. The allocator of pinned memory
        # hands it out again only after the copy is done.
        self._packed = torch.empty(
            (1 + num_words) * len(lines), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device = device
        packed: Int32Array = self._packed.numpy()
        packed[len(lines) * num_words :] = lines
        super().__init__(lines, packed[: len(lines) * num_words].reshape(len(lines), num_words))
        self._parts = self._split(self._packed) if device.type == "cpu" else None

    def serve(self, lines: Int32Array, num_words: int) -> bool:
        """Whether they can be filled in for these lines; on a GPU a copy may still be under way."""
        return (
            self._parts is not None
            and self.bits.shape[1] == num_words
            and (lines is self.lines or np.array_equal(lines, self.lines))
        )

    def apply(self, logits: Tensor) -> None:
        """Forbid what the masks do not allow."""
        parts = self._parts or self._split(self._packed.to(self._device, non_blocking=True))
        dispatch.apply_bitmask(logits, *parts)

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(lines, bits)."""
        bits, lines = packed.split([self.bits.size, len(self.bits)])
        return lines, bits.view(self.bits.shape)
