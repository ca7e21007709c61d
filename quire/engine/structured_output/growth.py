"""`Growth`: more starts for grammars that many sequences have, so that their masks can be made on
several threads at once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire.engine.structured_output.grammar import Grammar, Start
from quire.engine.structured_output.matcher import Matcher
from quire.engine.structured_output.threads import submit

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Growth:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # One after the other, and apart from the forms that requests wait for.
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
