"""`Grammar`, `Matcher`, `Growth`: a compiled grammar, the sequences that have it and where each
stands in it, and the starting points that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.engine.structured_output.build import DEAD_END, submit
from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 32
Words = NDArray[np.uint32]
SEQUENCES_PER_START = 4
"""With fewer on each, another start costs more than the turns it saves."""


@dataclass(eq=False)
class Start:
    """A compiled state from which sequences begin, as copies. All copies share one lexer behind a
    lock: masks for them are made one after the other, whatever the number of threads."""

    matcher: LLMatcher
    num_sequences: int = 0


@dataclass(eq=False)
class Grammar:
    starts: list[Start]
    tokenizer: LLTokenizer
    num_words: int
    """32-bit words of a mask over the vocabulary."""
    compile: Callable[[], LLMatcher]
    """Makes another start from the text."""
    is_growing: bool = field(default=False, init=False)

    def join(self) -> Start:
        """The start for one more sequence."""
        start = min(self.starts, key=lambda one: one.num_sequences)
        start.num_sequences += 1
        return start

    def leave(self, start: Start) -> None:
        """A sequence has ended. Starts hold megabytes: without sequences, one is enough."""
        start.num_sequences -= 1
        if self.num_sequences == 0:
            del self.starts[1:]

    @property
    def num_sequences(self) -> int:
        return sum(one.num_sequences for one in self.starts)

    def wants_start(self, num_threads: int) -> bool:
        """Whether its sequences are so many that another start is worth compiling."""
        count = len(self.starts)
        if self.is_growing or count >= num_threads:
            return False
        return self.num_sequences > count * SEQUENCES_PER_START


class Matcher:
    """Where one sequence stands in its grammar."""

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


def token_bits(tokens: Iterable[int], num_words: int) -> Words:
    """A mask with the bits of these tokens."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
    return words


class Growth:
    """More starts for grammars that many sequences have, so that their masks can be made on several
    threads at once."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # One after the other, and apart from the grammars that requests wait for.
        self._pool: ThreadPoolExecutor | None = None
        self._growing: dict[Grammar, Future[LLMatcher]] = {}

    def consider(self, grammar: Grammar) -> None:
        """Begin to compile another start if there are sequences for it."""
        if grammar.wants_start(self._num_threads):
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "quire-grammar-starts")
            grammar.is_growing = True
            self._growing[grammar] = submit(self._pool, grammar.compile)

    def poll(self, matchers: Iterable[Matcher]) -> bool:
        """Let sequences move to starts that are ready; says whether some did."""
        has_moved = False
        for grammar, made in list(self._growing.items()):
            if not made.done():
                continue
            del self._growing[grammar]
            grammar.is_growing = False
            own = [matcher for matcher in matchers if matcher.grammar is grammar]
            if not own:
                continue  # all have ended meanwhile
            start = Start(made.result())
            grammar.starts.append(start)
            fair = len(own) // len(grammar.starts)
            for matcher in own:
                if start.num_sequences >= fair:
                    break
                if matcher.start.num_sequences > fair:
                    matcher.move_to(start)
                    has_moved = True
            self.consider(grammar)
        return has_moved

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
