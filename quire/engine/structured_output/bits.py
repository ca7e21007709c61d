"""Masks that grammars alone have made, brought in line with the requests' settings. For all rows
of a step at once: a few array operations instead of some for each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.protocol.plan import BoolArray, Int32Array

if TYPE_CHECKING:
    from quire.engine.structured_output.matcher import Matcher

WORD_BITS = 32
Words = NDArray[np.uint32]


class MaskSettings:
    """What requests say about their ends and about allowed tokens, one request for each row."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers
        rows_of: dict[Any, list[int]] = {}
        for row, matcher in enumerate(matchers):
            rows_of.setdefault((matcher.eos, matcher.ends), []).append(row)
        self._ends = [
            _Ends(np.array(rows)[:, None], eos, ends) for (eos, ends), rows in rows_of.items()
        ]
        self._allowed = [
            (row, matcher.allowed)
            for row, matcher in enumerate(matchers)
            if matcher.allowed is not None
        ]

    def apply(self, masks: Int32Array) -> BoolArray:
        """Bring `masks` [rows, words] in line; returns which rows are left with one token.

        A matcher whose mask is empty fails. Its mask then allows everything, for the sampler must
        find some token; that is thrown away.
        """
        for matcher in self._matchers:
            matcher.check()
        words = masks.view(np.uint32)
        for ends in self._ends:
            ends.apply(words)
        for row, allowed in self._allowed:
            words[row] &= allowed
        union = np.bitwise_or.reduce(words, axis=1)
        one_token: BoolArray = union & (union - np.uint32(1)) == 0
        for row in np.flatnonzero(one_token).tolist():
            one_token[row] = np.count_nonzero(words[row]) == 1
            if not union[row]:
                self._matchers[row].found_nothing()
        for row, matcher in enumerate(self._matchers):
            if matcher.failure is not None:
                masks[row] = -1
        return one_token


class _Ends:
    """Allows `ends` where the grammar allows an end, which it shows by any of `eos`."""

    def __init__(
        self, rows: NDArray[np.int64], eos: tuple[int, ...], ends: tuple[int, ...]
    ) -> None:
        """`rows` [rows, 1]"""
        self._places = rows, np.array(sorted({token // WORD_BITS for token in (*eos, *ends)}), int)
        num_words = 1 + max((*eos, *ends), default=0) // WORD_BITS
        self._eos = token_bits(eos, num_words)[self._places[1]]
        self._ends = token_bits(ends, num_words)[self._places[1]]

    def apply(self, words: Words) -> None:
        some = words[self._places]
        shown = some & self._eos
        some ^= shown
        some |= self._ends * shown.any(axis=1, keepdims=True)
        words[self._places] = some


def token_bits(tokens: Iterable[int], num_words: int) -> Words:
    """A mask with the bits of these tokens."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token // WORD_BITS] |= _bit(token)
    return words


def _bit(token: int) -> np.uint32:
    return np.uint32(1 << token % WORD_BITS)
