"""`Grammar`, `Matcher`, `Growth`, `Batch`: a compiled grammar, where each of its sequences stands
in it, the starting points that they share, and the masks of those that a step samples for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.structured_output.grammar_source import DEAD_END, submit
from quire.protocol.plan import BoolArray, Int32Array, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

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
        self.drafts: list[int] = []
        """Those that wait in its row, as its last result told."""
        self.empty_after: int | None = None
        """After so many of them it allows no token, as their masks have shown."""
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

    def consume(self, token: int, num_before: int = 0) -> None:
        """Take in a sampled token, `num_before` others of its step before it."""
        if num_before and num_before == self.empty_after:
            self.found_nothing()
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

    @property
    def num_allowed_drafts(self) -> int:
        """How many of the drafts it allows, from the first on."""
        return self.native.validate_tokens(self.drafts) if self.failure is None else 0

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


class Batch:
    """Kept from step to step as long as the same requests run. After a forward pass nothing is in
    the processor's caches, and what looks like a moment's work takes a tenth of a millisecond: so
    all that does not change is gathered once."""

    def __init__(
        self, plan: StepPlan, places: Int32Array, members: list[tuple[Sequence, Matcher]]
    ) -> None:
        """`places` are among the plan's rows that sample."""
        matchers = [matcher for _, matcher in members]
        self.places = places
        self.num_lines = plan.num_samples[plan.samples][places]
        ends = np.cumsum(self.num_lines, dtype=np.int32)
        self._first = ends - self.num_lines
        """Of each member, its first line among those of all members."""
        offsets = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
        offsets -= np.repeat(self._first, self.num_lines)
        self.lines = np.repeat(plan.first_lines[places], self.num_lines) + offsets
        self._has_drafts = len(self.lines) > len(members)
        self.members = members
        self.rows: Int32Array = plan.rows[plan.samples][places]
        self.num_words = matchers[0].grammar.num_words if matchers else 0
        of_lines = zip(matchers, self.num_lines.tolist(), strict=False)
        self._settings = MaskSettings([one for one, n in of_lines for _ in range(n)], offsets)
        self.may_jump: BoolArray = np.array([matcher.may_jump for matcher in matchers], np.bool_)
        self._plan = _composition(plan)
        self._epochs = plan.epochs[plan.samples][places].tobytes()
        # Copies of one start lock each other out: they are kept together, so that threads take
        # different ones.
        order = sorted(range(len(matchers)), key=lambda i: id(matchers[i].start))
        self._work = [(matchers[i].native, int(self._first[i])) for i in order]
        self._has_one_start = len({id(matcher.start) for matcher in matchers}) == 1

    def is_that_of(self, plan: StepPlan, epochs: Int32Array) -> bool:
        """Whether a plan has the same samples, and they all still count. `epochs` are those of
        its rows now."""
        return self._plan == _composition(plan) and self._epochs == epochs.tobytes()

    def fill(self, bits: Int32Array, pool: Callable[[], LLExecutor]) -> BoolArray:
        """What the members allow in their lines, to `bits` [lines, words]; returns which members
        have a line with one token alone."""
        self._fill(bits, pool)
        one_token = self._settings.apply(bits)
        if self._has_drafts:
            one_token = np.logical_or.reduceat(one_token, self._first)
        return one_token

    def _fill(self, bits: Int32Array, pool: Callable[[], LLExecutor]) -> None:
        """What the grammars alone allow. Lines behind a draft that one of them forbids are never
        looked at, and allow everything."""
        address, stride = bits.ctypes.data, bits.strides[0]
        if self._has_drafts:
            bits.fill(-1)
            drafted, plain = [], []
            for (_, matcher), first, count in zip(
                self.members, self._first.tolist(), self.num_lines.tolist(), strict=True
            ):
                matcher.empty_after = None
                if drafts := matcher.drafts[: count - 1]:
                    drafted.append((matcher.native, first, drafts))
                else:
                    plain.append((matcher.native, first))
            if drafted:
                pool().unsafe_compute_mask_ptr_with_draft_token(drafted, address, stride, len(bits))
            if plain:
                pool().unsafe_compute_mask_ptr(plain, address, stride, len(bits))
        elif self._has_one_start:
            for native, i in self._work:
                native.unsafe_compute_mask_ptr(address + i * stride, stride)
        else:
            pool().unsafe_compute_mask_ptr(self._work, address, stride, len(bits))


def _composition(plan: StepPlan) -> tuple[bytes, bytes, bytes]:
    """Equal for plans in which the same requests compute and sample."""
    return plan.rows.tobytes(), plan.epochs.tobytes(), plan.num_samples.tobytes()


class MaskSettings:
    """What requests say about their ends and about allowed tokens, one request for each row. Brings
    masks that grammars alone have made in line with it, for all rows of a step at once: a few array
    operations instead of some for each row."""

    def __init__(self, matchers: list[Matcher], offsets: Int32Array | None = None) -> None:
        """Of each row its matcher, and how many drafts are before it."""
        self._matchers = matchers
        self._offsets = np.zeros(len(matchers), np.int32) if offsets is None else offsets
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

        A matcher whose mask is empty fails, behind drafts only if they are accepted. Its mask then
        allows everything, for the sampler must find some token; that is thrown away.
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
                if num_drafts := int(self._offsets[row]):
                    self._matchers[row].empty_after = num_drafts
                    masks[row] = -1
                else:
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
