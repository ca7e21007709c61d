"""One line of JSON for each request that ended, where `enable_log_requests` asks for it."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from quire.frontend.output_processor import OpenRequest, OpenSequence
from quire.server.finished import FinishedRequest, end_of

logger = logging.getLogger("quire.requests")


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
