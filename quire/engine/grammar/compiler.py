"""`GrammarCompiler`: turns forms into grammars on threads of its own, once for each form."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config.structured import GrammarSettings
from quire.engine.grammar.grammar import DEAD_END, Grammar, Start
from quire.engine.grammar.threads import submit
from quire.engine.grammar.translate import grammar_text
from quire.protocol.errors import OverloadedError, QuireError, RequestError
from quire.protocol.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_CACHED = 256
MAX_COMPILE_S = 0.7
"""So that an answer about a form that is too dear comes within a second."""
MAX_WAIT_S = 30.0
"""For a thread, while forms that are too dear hold all of them: they cannot be stopped."""
LEXER_FUEL = 500_000
"""What building a grammar's expressions may cost, in llguidance's units: about 50,000 in 1 ms."""
MAX_LEXER_STATES = 50_000
"""1 to 2 kB each."""
WORDS = ("[a-z]{1,10}", "[a-z ]{1,10}", "[a-z ]{1,30}", "[A-Za-z]{1,10}", "[A-Za-z ]{1,30}")
"""Sets of tokens that grammars often allow all of, from small to large. Where they do, a mask takes
the set as it is; otherwise each of its tokens is looked at. llguidance has such sets for the
strings of JSON; these are for expressions: a mask of `[a-z ]{400}` took 700 us, and takes 16."""


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of the tokenizer."""

    tokenizer_json: str
    """In the `tokenizers` library's format."""
    vocab_size: int
    """The model's; it may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]


@dataclass(eq=False)
class Compilation:
    """A grammar that is being made. `began` is when a thread took it up."""

    where: str
    future: Future[Grammar] = field(default_factory=Future)
    asked: float = field(default_factory=time.monotonic)
    began: float | None = None

    @property
    def is_late(self) -> bool:
        began, now = self.began, time.monotonic()
        return began is not None and now - began > MAX_COMPILE_S and not self.future.done()

    @property
    def was_forgotten(self) -> bool:
        """Whether no thread has had time for it."""
        return self.began is None and time.monotonic() - self.asked > MAX_WAIT_S

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return self.future.done() or self.is_late or self.was_forgotten

    def result(self) -> Grammar:
        """The grammar, or the `RequestError` that says what is wrong with the form."""
        while not self.is_late:
            try:
                return self.future.result(timeout=0.05)
            except TimeoutError:
                if self.was_forgotten:
                    raise OverloadedError(
                        f"{self.where} waited {MAX_WAIT_S:g} s to be compiled; try again later."
                    ) from None
        raise RequestError(
            f"{self.where} takes more than {MAX_COMPILE_S:g} s to compile; use a simpler one."
        )


class GrammarCompiler:
    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._tokenizer: Future[LLTokenizer] | None = None
        self._cache: OrderedDict[tuple[Any, ...], Compilation] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def has_vocabulary(self) -> bool:
        return self._vocabulary is not None

    def set_vocabulary(self, read: Callable[[], Vocabulary]) -> None:
        """Where the vocabulary is read from, on a thread, when the first grammar needs it."""
        self._vocabulary = read

    def prepare(self) -> None:
        """Read the vocabulary now, so that no request waits for it."""
        with self._lock:
            self._begin_tokenizer()

    def compile(self, wanted: StructuredOutputs) -> Compilation:
        """Begin to compile a form, unless it is there already."""
        if self._vocabulary is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, but the engine has none "
                "(skip_tokenizer_init=True)."
            )
        key = (
            wanted.kind,
            wanted.text,
            wanted.disable_any_whitespace,
            wanted.disable_additional_properties,
            wanted.whitespace_pattern,
        )
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            if len(self._cache) >= MAX_CACHED:
                self._make_room()
            self._begin_tokenizer()
            made = self._cache[key] = Compilation(f"structured_outputs.{wanted.kind}")
            submit(self._pool(), self._run, made, wanted)
        return made

    def _make_room(self) -> None:
        oldest = next((key for key, one in self._cache.items() if one.future.done()), None)
        if oldest is None:
            raise OverloadedError(
                f"structured_outputs: {MAX_CACHED} other forms wait to be compiled; try again."
            )
        del self._cache[oldest]

    def shutdown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # --- on the threads -------------------------------------------------------------------------

    def _run(self, made: Compilation, wanted: StructuredOutputs) -> None:
        assert self._tokenizer is not None
        try:
            tokenizer = self._tokenizer.result()
            made.began = time.monotonic()
            made.future.set_result(self._compile(wanted, tokenizer, made.where))
        except QuireError as error:
            made.future.set_exception(error)
        except BaseException as error:  # also a panic of llguidance, which is no Exception
            logger.error("%s could not be compiled", made.where, exc_info=error)
            made.future.set_exception(
                RequestError(f"{made.where} cannot be compiled: {error!r:.200}")
            )

    def _compile(self, wanted: StructuredOutputs, tokenizer: LLTokenizer, where: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        try:
            text = grammar_text(wanted, self._settings)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{where} cannot be read: {error}.") from None

        def make_start() -> LLMatcher:
            made = LLMatcher(tokenizer, text, log_level=0, limits=limits)
            if made.is_error():
                return made
            # The first mask costs as much as building the grammar did: pay for it here.
            tried = made.deep_copy()
            tried.compute_bitmask()
            return tried if tried.is_error() else made

        matcher = make_start()
        if matcher.is_error():
            raise RequestError(f"{where} is refused: {_reason(matcher.get_error())}")
        if unenforced := matcher.get_grammar_warnings():
            raise RequestError(f"{where} cannot be enforced in full: {'; '.join(unenforced)}")
        return Grammar([Start(matcher)], tokenizer, -(-tokenizer.vocab_size // 32), make_start)

    def _begin_tokenizer(self) -> None:
        if self._tokenizer is None:
            self._tokenizer = submit(self._pool(), self._make_tokenizer)

    def _make_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "structured_outputs needs the package llguidance; install it with "
                "`pip install llguidance`."
            ) from None
        assert self._vocabulary is not None
        vocabulary = self._vocabulary()
        try:
            spaces, *strings = LLTokenizer.general_slices()
            return LLTokenizer(
                vocabulary.tokenizer_json,
                n_vocab=vocabulary.vocab_size,
                eos_token=list(vocabulary.eos_token_ids),
                slices=[spaces, *WORDS, *strings],
            )
        except ValueError as error:
            raise RequestError(
                f"structured_outputs cannot be used: llguidance cannot read this model's "
                f"tokenizer: {error}."
            ) from None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-grammar")
        return self._threads


def _reason(error: str) -> str:
    """llguidance's message, cut to what a client can use."""
    if error.startswith(DEAD_END):
        return "no text has this form."
    text = " ".join(error.split())
    keywords = re.fullmatch(r"Unimplemented keys: \[(.*)\]", text)
    if keywords is not None:
        return f"the keywords {keywords[1]} cannot be enforced; leave them out."
    return text if len(text) <= 500 else text[:500] + "..."
