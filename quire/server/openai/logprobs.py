"""Logprobs in the two formats of the OpenAI protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.frontend.outputs import Logprob

LEAST = -9999.0
"""JSON has no infinity; this is what vLLM writes for it."""


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


@dataclass(frozen=True)
class Candidates:
    """Which tokens are told about at each position: the likeliest, or those with given ids."""

    num_top: int = 0
    ids: Collection[int] | None = None

    def of(self, entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Most likely first."""
        ids = entry if self.ids is None else entry.keys() & self.ids
        named = ((token, entry[token]) for token in ids)
        ranked = sorted(named, key=lambda item: -item[1].logprob)
        return ranked[: self.num_top] if self.ids is None else ranked


def chat_logprobs(
    token_ids: list[int],
    entries: Iterable[dict[int, Logprob]],
    candidates: Candidates,
    as_ids: bool,
) -> dict[str, Any]:
    """`{"content": [...]}`, one record per token."""

    def record(token_id: int, entry: Logprob) -> dict[str, Any]:
        text = token_text(token_id, entry, as_ids)
        return {
            "token": text,
            "logprob": max(entry.logprob, LEAST),
            "bytes": list(text.encode("utf-8", "replace")),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own, top = record(token_id, entry[token_id]), candidates.of(entry)
        content.append({**own, "top_logprobs": [record(*item) for item in top]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The parallel lists of the completions protocol; offsets go on from chunk to chunk."""

    def __init__(self, candidates: Candidates, as_ids: bool, text_of: Callable[[int], str]) -> None:
        self._candidates = candidates
        self._as_ids = as_ids
        self._text_of = text_of
        self._offset = 0

    def lists(
        self, token_ids: list[int], entries: Iterable[dict[int, Logprob] | None]
    ) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            # Nothing predicts the first token of a prompt.
            own = Logprob(0.0, None, self._text_of(token_id)) if entry is None else entry[token_id]
            text = token_text(token_id, own, self._as_ids)
            tokens.append(text)
            values.append(None if entry is None else max(own.logprob, LEAST))
            tops.append(None if entry is None else self._top(token_id, entry))
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: dict[int, Logprob]) -> dict[str, float]:
        """The candidates, and the one that was chosen. Tokens may have the same text, such as bytes
        of longer characters: all but the first of them go by their ids."""
        told: dict[str, float] = {}
        for token, one in (dict(self._candidates.of(entry)) | {token_id: entry[token_id]}).items():
            text = token_text(token, one, self._as_ids)
            text = token_text(token, one, True) if text in told else text
            told[text] = max(one.logprob, LEAST)
        return told
