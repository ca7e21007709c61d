"""`Matcher`: where one sequence stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.structured_output.bits import Words, token_bits
from quire.engine.structured_output.grammar import DEAD_END, Grammar, Start
from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    def __init__(self, grammar: Grammar, params: SamplingParams, eos: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.start = grammar.join()
        self.native: LLMatcher = self.start.matcher.deep_copy()
        self._tokens: list[int] = []
        self.failure: str | None = None
        """Why the sequence cannot go on."""
        self.may_jump = not (params.wants_logprobs or params.allowed_token_ids or params.bad_words)
        """Whether tokens may be appended that no sampler has seen: they have no logprobs, and no
        other rule was asked about them."""
        self.eos = eos
        is_special = grammar.tokenizer.is_special_token
        stops = [token for token in params.stop_token_ids or () if is_special(token)]
        self.ends = (*(() if params.ignore_eos else eos), *stops)
        """Tokens that end the request. They stand outside its text, and are allowed where that may
        end."""
        self.allowed: Words | None = None
        if params.allowed_token_ids is not None:
            self.allowed = token_bits(params.allowed_token_ids, grammar.num_words)

    @property
    def is_complete(self) -> bool:
        """Whether the text can only end here."""
        return self.failure is None and self.native.is_stopped() and self.native.is_accepting()

    def consume(self, token: int) -> None:
        """Take a sampled token in."""
        if self.failure is None and not self.native.consume_token(token):
            self._refuse(token)
        self._tokens.append(token)

    def check_end(self, token: int) -> None:
        """Fail if a token that ends the request was sampled where it was not allowed: a sampler
        that may choose none takes any."""
        if token in self.ends:
            is_allowed = self.native.is_accepting()
        else:
            is_allowed = self.native.validate_tokens([token]) == 1
        if not is_allowed:
            self._refuse(token)

    def forced(self) -> list[int]:
        """The tokens that can only follow, taken in already."""
        tokens: list[int] = self.native.compute_ff_tokens()
        if tokens:
            tokens = tokens[: self.native.try_consume_tokens(tokens)]
            self._tokens += tokens
        return tokens

    def move_to(self, start: Start) -> None:
        """Go on, from where it stands, as a copy of another start."""
        start.num_sequences += 1
        self.leave()
        self.start, self.native = start, start.matcher.deep_copy()
        if self.failure is None and not self.native.consume_tokens(self._tokens):
            self._fail("it refused tokens that it had allowed")

    def leave(self) -> None:
        """The sequence has ended."""
        self.grammar.leave(self.start)

    def check(self) -> None:
        """Fail if no mask could be made; the one that came instead would let the text end here."""
        if self.native.is_error():
            self._fail("there is no token that it allows")

    def found_nothing(self) -> None:
        """No token is left that may follow."""
        settings = "allowed_token_ids leaves" if self.allowed is not None else "there is"
        self._fail(f"{settings} no token that it allows")

    def _refuse(self, token: int) -> None:
        self._fail(f"token {token} was sampled, which it does not allow")

    def _fail(self, otherwise: str) -> None:
        if self.failure is None:
            error = " ".join(self.native.get_error().split())[:300]
            reason = otherwise if error.startswith(DEAD_END) else error or otherwise
            self.failure = f"structured_outputs: the grammar cannot go on: {reason}."
