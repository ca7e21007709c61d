"""`Grammar`: a compiled form, and the starting points of the sequences that have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DEAD_END = "NoExtension"
"""How llguidance's errors begin where no token can follow."""
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
