"""Masks that grammars alone have made, brought in line with the requests' settings. For all rows
of a step at once: a few array operations instead of some for each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.protocol.plan import BoolArray, Int32Array

if TYPE_CHECKING:
    from quire.engine.grammar.matcher import Matcher

WORD_BITS = 32
Words = NDArray[np.uint32]


def adjust(masks: Int32Array, matchers: Sequence[Matcher]) -> BoolArray:
    """Apply what requests say about their ends and about allowed tokens to `masks` [rows, words];
    returns which rows are left with one token.

    A matcher whose mask is empty fails. Its mask then allows everything, for the sampler must find
    some token; that is thrown away.
    """
    words = masks.view(np.uint32)
    rows_of: dict[Any, list[int]] = {}
    for row, matcher in enumerate(matchers):
        matcher.check()
        rows_of.setdefault((matcher.eos, matcher.ends), []).append(row)
    for (eos, ends), rows in rows_of.items():
        _set_ends(words, np.array(rows), eos, ends)
    for row, matcher in enumerate(matchers):
        if matcher.allowed is not None:
            words[row] &= matcher.allowed
    largest = words.max(axis=1)
    for row in np.flatnonzero(largest == 0).tolist():
        matchers[row].found_nothing()
    one_word = words.sum(axis=1, dtype=np.uint64) == largest
    for row, matcher in enumerate(matchers):
        if matcher.failure is not None:
            masks[row] = -1
    one_bit: BoolArray = one_word & (largest != 0) & (largest & (largest - np.uint32(1)) == 0)
    return one_bit


def _set_ends(
    words: Words, rows: NDArray[np.int64], eos: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    """Allow `ends` where the grammar allows an end, which it shows by any of `eos`."""
    may_end = np.zeros(len(rows), np.uint32)
    for token in eos:
        may_end |= words[rows, token // WORD_BITS] >> np.uint32(token % WORD_BITS) & np.uint32(1)
    for token in eos:
        words[rows, token // WORD_BITS] &= ~_bit(token)
    for token in ends:
        words[rows, token // WORD_BITS] |= may_end * _bit(token)


def token_bits(tokens: Iterable[int], num_words: int) -> Words:
    """A mask with the bits of these tokens."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token // WORD_BITS] |= _bit(token)
    return words


def _bit(token: int) -> np.uint32:
    return np.uint32(1 << token % WORD_BITS)
