"""What benchmarks run: prompts of token ids and how many tokens to generate for each."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.flags import Lengths
from quire.protocol.errors import RequestError


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and the number of tokens to generate, no more and no fewer."""

    token_ids: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_output_tokens

    def described(self) -> dict[str, int]:
        return {"input_tokens": len(self.token_ids), "output_tokens": self.num_output_tokens}


class Dice:
    """Random lengths and tokens, equal for equal seeds."""

    def __init__(self, seed: int, vocab_size: int, distribution: str = "log-uniform") -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._distribution = distribution

    def length(self, lengths: Lengths) -> int:
        if self._distribution == "uniform":
            return self._random.randint(lengths.low, lengths.high)
        low, high = math.log(lengths.low), math.log(lengths.high + 1)
        return min(int(math.exp(self._random.uniform(low, high))), lengths.high)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def requests(self, count: int, inputs: Lengths, outputs: Lengths) -> list[BenchRequest]:
        """Unrelated prompts."""
        return [
            BenchRequest(self.tokens(self.length(inputs)), self.length(outputs))
            for _ in range(count)
        ]

    def shared_prefix_requests(
        self, systems: int, questions: int, system_len: int, question_len: int, output_len: int
    ) -> list[BenchRequest]:
        """`questions` prompts under each of `systems` system prompts, taking turns."""
        prefixes = [self.tokens(system_len) for _ in range(systems)]
        return [
            BenchRequest(prefix + self.tokens(question_len), output_len)
            for _ in range(questions)
            for prefix in prefixes
        ]


def longest(requests: Sequence[BenchRequest]) -> int:
    """Prompt and output tokens of the longest request."""
    return max(request.num_tokens for request in requests)


def read_requests(place: str) -> list[BenchRequest]:
    """Requests from `FILE` or `FILE:KEY`: a JSON list of {"ids": [...], "out": N}, or an object
    that holds such a list under KEY."""
    path, key = place, ""
    if ":" in place and not Path(place).exists():
        path, _, key = place.rpartition(":")
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"--requests {place!r}: {path} cannot be read ({error}).") from None
    if isinstance(content, dict):
        if key not in content:
            names = ", ".join(content) or "nothing"
            raise RequestError(
                f"--requests {place!r}: {path} holds {names}; name one of them as FILE:KEY."
            )
        content = content[key]
    if not isinstance(content, list) or not content:
        raise RequestError(f"--requests {place!r} must lead to a list of requests.")
    return [_read_request(place, index, item) for index, item in enumerate(content)]


def _read_request(place: str, index: int, item: Any) -> BenchRequest:
    ids, out = (item.get("ids"), item.get("out")) if isinstance(item, dict) else (None, None)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(token) is int for token in ids)
        or type(out) is not int
        or out < 1
    ):
        raise RequestError(
            f"--requests {place!r}: entry {index} must be an object with ids (token ids) and out "
            f"(tokens to generate, at least 1), got {str(item)[:60]}."
        )
    return BenchRequest(ids, out)
