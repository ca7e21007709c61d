"""New inputs from old ones: bytes and texts cut up and spoilt, JSON documents with nasty values."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.server.hostile import NASTY

MAX_BYTES = 1 << 13
"""Longer inputs say little more, and take long; targets that want some make them themselves."""
INTEGERS = [
    *(0, 1, 2, 7, 8, 31, 32, 127, 128, 255, 256, 32767, 65535, 65536, 10**6, 2**24, 2**30),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
]
MAX_DOCUMENT_BYTES = 1 << 16
"""What is repeated 200 times, and that again, would take all memory there is."""
MAX_DEPTH = 100
"""Documents that nest deeper are left to `NASTY`: Python's own recursion ends there."""


class Mutator:
    """Makes an input out of those of a corpus. The same seed makes the same inputs."""

    def __init__(self, seed: int, tokens: Sequence[bytes]) -> None:
        self.chance = random.Random(seed)
        self._tokens = tokens
        """Words of the format: what takes chance alone too long to spell."""

    def mutate(self, corpus: Sequence[bytes]) -> bytes:
        data = self.chance.choice(corpus)
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 5, 8))):
            data = self._mutate_once(data, corpus)
        return data[:MAX_BYTES]

    def _mutate_once(self, data: bytes, corpus: Sequence[bytes]) -> bytes:
        chance = self.chance
        start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        if chance.random() < 0.7:  # mostly small changes
            end = min(end, start + chance.randrange(1, 9))
        kind = chance.randrange(9)
        if kind == 0:
            return data[:start] + self._integer() + data[start:]
        if kind == 1:
            number = self._integer()
            return data[:start] + number + data[start + len(number) :]
        if kind == 2 and self._tokens:
            return data[:start] + chance.choice(self._tokens) + data[end:]
        if kind == 3 and self._tokens:
            return data[:start] + chance.choice(self._tokens) + data[start:]
        if kind == 4:
            return data[:start] + data[end:]
        if kind == 5:
            return data[:end] + data[start:end] * chance.choice((1, 1, 2, 10, 100)) + data[end:]
        if kind == 6:
            other = chance.choice(corpus)
            at = chance.randrange(len(other) + 1)
            return data[:start] + other[at : at + chance.choice((4, 16, 64, 1024))] + data[end:]
        if kind == 7 and data:
            return data[:start]
        flipped = bytes([chance.randrange(256)])
        return data[:start] + flipped + data[start + 1 :]

    def _integer(self) -> bytes:
        width = self.chance.choice((1, 2, 4, 8))
        number = self.chance.choice(INTEGERS) % (1 << 8 * width)
        return number.to_bytes(width, "little")

    def mutate_json(self, data: bytes, corpus: Sequence[bytes]) -> bytes:
        """A document with something inside replaced; bytes that are none are spoilt as such."""
        try:
            value, made = json.loads(data), data
            for _ in range(self.chance.choice((1, 1, 2, 4))):
                value = self._change(value, 0)
                longer = json.dumps(value).encode()
                if len(longer) > MAX_DOCUMENT_BYTES:
                    break
                made = longer
            return made
        except (ValueError, RecursionError):
            return self._mutate_once(data, corpus)

    def _change(self, value: Any, depth: int) -> Any:
        chance = self.chance
        goes_on = isinstance(value, (dict, list)) and value and depth < MAX_DEPTH
        if goes_on and chance.random() < 0.8:
            changed = dict(value) if isinstance(value, dict) else list(value)
            keys = list(changed) if isinstance(changed, dict) else range(len(changed))
            key: Any = chance.choice(keys)
            kind = chance.randrange(10)
            if kind == 0:
                del changed[key]
            elif kind == 1 and isinstance(changed, list):
                changed += [changed[key]] * chance.choice((1, 10, 200))
            elif kind == 2 and isinstance(changed, dict):
                changed[self._word()] = changed[key]
            elif kind == 3:
                changed[key] = changed[chance.choice(keys)]
            else:
                changed[key] = self._change(changed[key], depth + 1)
            return changed
        if isinstance(value, str) and chance.random() < 0.5:
            at = chance.randrange(len(value) + 1)
            return value[:at] + self._word() + value[at:]
        if isinstance(value, int) and chance.random() < 0.5:
            return chance.choice(INTEGERS) * chance.choice((1, 1, -1))
        return self._word() if chance.random() < 0.3 else chance.choice(NASTY)

    def _word(self) -> str:
        if not self._tokens:
            return "a"
        return self.chance.choice(self._tokens).decode("utf-8", "replace")
