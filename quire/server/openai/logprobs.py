"""Logprobs in the two forms of the OpenAI protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.frontend.outputs import Logprob

LEAST = -9999.0
"""JSON has no infinity; this is what vLLM writes for it."""


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def chat_logprobs(
    token_ids: list[int], entries: Iterable[dict[int, Logprob]], num_top: int, as_ids: bool
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
        top = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
        own = record(token_id, entry[token_id])
        content.append({**own, "top_logprobs": [record(*item) for item in top]})
    return {"content": content}


class CompletionLogprobs:
    """The parallel lists of the completions protocol; offsets go on from chunk to chunk."""

    def __init__(self, num_top: int, as_ids: bool, text_of: Callable[[int], str]) -> None:
        self._num_top = num_top
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
        """The most likely tokens, and the one that was chosen."""
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[: self._num_top]
        chosen = dict(ranked) | {token_id: entry[token_id]}
        return {
            token_text(i, one, self._as_ids): max(one.logprob, LEAST) for i, one in chosen.items()
        }
