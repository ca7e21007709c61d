"""`Target`: what is fuzzed, and with which inputs it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.fuzz.mutations import Mutator

CORPUS = Path(__file__).parent / "corpus"


class Target:
    """Reads one input. Whatever it raises is a finding: what it may raise it catches itself."""

    name: ClassVar[str]
    tokens: ClassVar[Sequence[bytes]] = ()
    """Words of its format, for the mutator."""

    def check(self, data: bytes) -> None:
        raise NotImplementedError

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        return mutator.mutate(corpus)

    def recover(self) -> None:
        """Forget what an input that failed has left behind."""

    def close(self) -> None:
        """Give back what it holds."""

    def corpus(self) -> list[Path]:
        return sorted((CORPUS / self.name).iterdir())
