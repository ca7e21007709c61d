"""`Matcher`: where one sequence stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.engine.grammar.compiler import Grammar
from quire.protocol.plan import Int32Array
from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD_BITS = 32


class Matcher:
    def __init__(self, grammar: Grammar, params: SamplingParams, eos: tuple[int, ...]) -> None:
        self.native: LLMatcher = grammar.start.deep_copy()
        self.num_words = grammar.num_words
        self.failure: str | None = None
        """Why the sequence cannot go on."""
        is_special = grammar.tokenizer.is_special_token
        stops = [token for token in params.stop_token_ids or () if is_special(token)]
        # Tokens that end a request stand outside its text; they are allowed where that may end.
        self._ends = _bits([] if params.ignore_eos else [*eos, *stops], grammar.num_words)
        self._eos = _bits(eos, grammar.num_words)
        self._among = None
        if params.allowed_token_ids is not None:
            self._among = _bits(params.allowed_token_ids, grammar.num_words)

    @property
    def is_complete(self) -> bool:
        """Whether the text can only end here."""
        return self.failure is None and self.native.is_stopped() and self.native.is_accepting()

    def consume(self, token: int) -> None:
        """Take a sampled token in."""
        if self.failure is None and not self.native.consume_token(token):
            self.failure = self._explain(f"token {token} was sampled, which it does not allow")

    def forced(self) -> list[int]:
        """The tokens that can only follow, taken in already."""
        tokens: list[int] = self.native.compute_ff_tokens()
        count = self.native.try_consume_tokens(tokens) if tokens else 0
        assert count == len(tokens), "a grammar refused what it forces"
        return tokens

    def adjust(self, mask: Int32Array) -> None:
        """Bring a mask that the grammar alone has made in line with the request's settings."""
        may_end = bool((mask & self._eos).any())
        mask &= ~self._eos
        if may_end:
            mask |= self._ends
        if self._among is not None:
            mask &= self._among
        if self.failure is None and not mask.any():
            settings = "allowed_token_ids leaves" if self._among is not None else "there is"
            self.failure = self._explain(f"{settings} no token that it allows")
        if self.failure is not None:
            mask.fill(-1)  # the token is thrown away; sampling needs one

    def _explain(self, otherwise: str) -> str:
        error = " ".join(self.native.get_error().split())[:300]
        return f"structured_outputs: the grammar cannot go on: {error or otherwise}."


def _bits(tokens: list[int] | tuple[int, ...], num_words: int) -> Int32Array:
    """A mask with the bits of these tokens."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
    return words.view(np.int32)
