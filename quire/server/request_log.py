"""`RequestLog`: one line of JSON for each request that ended (`enable_log_requests`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.output_processor import OpenRequest, OpenSequence

logger = logging.getLogger("quire.requests")


@dataclass(frozen=True)
class FinishedRequest:
    """An HTTP request that was answered, refused or left by its client."""

    request_id: str
    path: str
    headers: dict[str, str]
    status: int | None
    """Of the reply; None if there was none."""
    started: float
    """On the monotonic clock."""
    made: Sequence[OpenRequest]
    """What the engine was asked for, empty if the request was refused before."""


def end_of(sequence: OpenSequence) -> str:
    """Why a sequence ended, also where the engine could not say so."""
    failed = sequence.request.error is not None
    return sequence.finish_reason or ("error" if failed else "disconnect")


Observer = Callable[[FinishedRequest], None]


class RequestLog:
    """Keys are never logged; texts only as far as `max_text` characters of each are asked for."""

    def __init__(self, max_text: int) -> None:
        self._max_text = max_text

    def __call__(self, finished: FinishedRequest) -> None:
        record: dict[str, Any] = {
            "request_id": finished.request_id,
            "path": finished.path,
            "status": finished.status,
            "total_s": round(time.monotonic() - finished.started, 4),
        }
        if finished.made:
            record |= self._generated(list(finished.made))
        logger.info("%s", msgspec.json.encode(record).decode())

    def _generated(self, made: list[OpenRequest]) -> dict[str, Any]:
        sequences = [sequence for one in made for sequence in one.sequences]
        record: dict[str, Any] = {
            "prompt_tokens": sum(len(one.prompt_token_ids) for one in made),
            "cached_tokens": sum(one.num_cached_tokens or 0 for one in made),
            "completion_tokens": sum(len(sequence.token_ids) for sequence in sequences),
            "finish_reasons": [end_of(sequence) for sequence in sequences],
            "queue_s": _shortest(made, "first_scheduled_time"),
            "first_token_s": _shortest(made, "first_token_time"),
        }
        if self._max_text:
            record["prompts"] = [self._cut(one.prompt or "") for one in made]
            record["outputs"] = [self._cut(_text(sequence)) for sequence in sequences]
        return record

    def _cut(self, text: str) -> str:
        # Prompts may hold half a character, which JSON cannot.
        return text[: self._max_text].encode("utf-8", "replace").decode()


def _shortest(made: list[OpenRequest], event: str) -> float | None:
    """From arrival to the first time that it happened to any of the requests."""
    times = [
        getattr(one.metrics, event) - one.metrics.arrival_time
        for one in made
        if getattr(one.metrics, event)
    ]
    return round(min(times), 4) if times else None


def _text(sequence: OpenSequence) -> str:
    return "" if sequence.detokenizer is None else sequence.detokenizer.text
