"""`GrammarCompiler`: compiles grammars on threads of its own, each of them once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.config.device import trim_heap
from quire.config.structured import GrammarSettings
from quire.engine.structured_output.grammar_source import (
    Vocabulary,
    build,
    make_tokenizer,
    submit,
    where,
)
from quire.engine.structured_output.matcher import Grammar, Start
from quire.engine.structured_output.sandbox import Sandbox
from quire.protocol.errors import EngineDeadError, OverloadedError, QuireError, RequestError
from quire.protocol.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

NUM_AT_ONCE = 8
"""Grammars that are tried at the same time."""
NUM_BUILT_AT_ONCE = 2
MAX_CACHED = 256
TRIM_AFTER = 128
"""Grammars that are let go of until the memory they leave is handed back: they are made of small
pieces on several threads, and what is free between others' pieces would pile up."""
MAX_WAIT_S = 30.0
"""For its turn, while grammars that cost too much take all of them."""
FORGET_S = 10.0
"""After that a grammar that was refused is tried again: the machine may have been too busy."""
SHUT_DOWN = "structured_outputs: the engine was shut down."


class Compilation:
    """A grammar that is being made."""

    def __init__(self, future: Future[Grammar]) -> None:
        self._future = future
        self._ended: list[float] = []
        """When, once it has."""
        # A future keeps its callbacks: one that held this object would close a cycle, and the
        # grammar, 0.1 MB or more outside Python, would wait for a full garbage collection.
        ended = self._ended
        future.add_done_callback(lambda future: ended.append(time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()

    @property
    def is_outdated(self) -> bool:
        """Whether it was called off, or failed long ago."""
        if self._future.cancelled():
            return True
        failed = self._future.done() and self._future.exception() is not None
        return failed and bool(self._ended) and time.monotonic() - self._ended[0] > FORGET_S

    def cancel(self) -> None:
        """Call it off unless it has begun; for its only waiter."""
        self._future.cancel()

    def result(self) -> Grammar:
        """The grammar, or the `QuireError` that says why there is none."""
        try:
            error = self._future.exception()
        except CancelledError:
            raise EngineDeadError(SHUT_DOWN) from None
        if error is not None:
            # It is raised for each request that has the grammar: its traceback would grow for ever.
            raise error.with_traceback(None)
        return self._future.result()


class GrammarCompiler:
    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._askers = ThreadPoolExecutor(NUM_AT_ONCE, "quire-grammar-compile")
        self._builders = ThreadPoolExecutor(NUM_BUILT_AT_ONCE, "quire-grammar")
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._tokenizer: Future[LLTokenizer] | None = None
        self._cache: OrderedDict[tuple[Any, ...], Compilation] = OrderedDict()
        self._num_let_go = 0
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._sandbox_lock = threading.Lock()
        self._is_shut_down = False

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
        """Begin to compile a grammar, unless it is there already."""
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
            if found is not None and not found.is_outdated:
                self._cache.move_to_end(key)
                return found
            if len(self._cache) >= MAX_CACHED:
                self._make_room()
            self._begin_tokenizer()
            try:
                future = self._askers.submit(self._run, wanted, time.monotonic())
            except RuntimeError:  # another thread has shut the engine down
                raise EngineDeadError(SHUT_DOWN) from None
            made = self._cache[key] = Compilation(future)
            self._cache.move_to_end(key)
        return made

    def _make_room(self) -> None:
        oldest = next((key for key, one in self._cache.items() if one.is_over), None)
        if oldest is None:
            raise OverloadedError(
                f"structured_outputs: {MAX_CACHED} other grammars wait to be compiled; try again."
            )
        del self._cache[oldest]
        self._num_let_go += 1
        if self._num_let_go % TRIM_AFTER == 0:
            with contextlib.suppress(RuntimeError):  # the engine is being shut down
                submit(self._builders, trim_heap)

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(wait=False, cancel_futures=True)
        with self._sandbox_lock:
            if self._sandbox is not None:
                self._sandbox.close()

    def _begin_tokenizer(self) -> None:
        if self._tokenizer is None:
            self._tokenizer = submit(self._builders, self._make_tokenizer)

    # --- on the threads -------------------------------------------------------------------------

    def _make_tokenizer(self) -> LLTokenizer:
        assert self._vocabulary is not None
        vocabulary = self._vocabulary()
        with contextlib.suppress(OverloadedError):  # the grammar that needs it is told
            self._living_sandbox(vocabulary)  # it makes its own tokenizer meanwhile
        return make_tokenizer(vocabulary)

    def _run(self, wanted: StructuredOutputs, asked: float) -> Grammar:
        assert self._tokenizer is not None
        try:
            tokenizer = self._tokenizer.result()
            if time.monotonic() - asked > MAX_WAIT_S:
                raise OverloadedError(
                    f"{where(wanted)} waited {MAX_WAIT_S:g} s to be compiled; try again later."
                )
            text = self._living_sandbox().grammar_text(wanted)

            def make_start() -> LLMatcher:
                return build(tokenizer, text, where(wanted))

            start = Start(self._begin_build(make_start).result())
            return Grammar([start], tokenizer, -(-tokenizer.vocab_size // 32), make_start)
        except QuireError:
            if self._is_shut_down:  # which ended the process that compiles
                raise EngineDeadError(SHUT_DOWN) from None
            raise
        except CancelledError:
            raise EngineDeadError(SHUT_DOWN) from None
        except BaseException as error:  # also a panic of llguidance, which is no Exception
            logger.error("%s could not be compiled", where(wanted), exc_info=error)
            raise RequestError(f"{where(wanted)} cannot be compiled: {error!r:.200}") from None

    def _begin_build(self, make_start: Callable[[], LLMatcher]) -> Future[LLMatcher]:
        try:
            return submit(self._builders, make_start)
        except RuntimeError as error:  # engine or program end, or no thread can be started
            raise OverloadedError(
                f"structured_outputs: the grammar cannot be compiled now: {error}."
            ) from None

    def _living_sandbox(self, vocabulary: Vocabulary | None = None) -> Sandbox:
        with self._sandbox_lock:
            if self._is_shut_down:
                raise EngineDeadError(SHUT_DOWN)
            if self._sandbox is None or not self._sandbox.is_alive:
                assert self._vocabulary is not None
                self._sandbox = Sandbox(vocabulary or self._vocabulary(), self._settings)
            return self._sandbox
