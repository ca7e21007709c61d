"""One line of JSON for each request that ended, where `log_requests` asks for it."""

from __future__ import annotations

import logging
import time

import msgspec
from fastapi import Request

from quire.frontend.collector import OpenRequest

logger = logging.getLogger("quire.requests")


def log_request(request: Request, made: list[OpenRequest], started: float) -> None:
    """`started` is when the engine took the requests. Neither texts nor keys are logged."""
    sequences = [sequence for one in made for sequence in one.sequences]
    first = min((one.metrics.first_token_time for one in made), default=0.0)
    record = {
        "request_id": request.state.request_id,
        "path": request.url.path,
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in made),
        "cached_tokens": sum(one.num_cached_tokens or 0 for one in made),
        "completion_tokens": sum(len(sequence.token_ids) for sequence in sequences),
        "finish_reasons": [sequence.finish_reason or "disconnect" for sequence in sequences],
        "first_token_s": round(first - started, 4) if first else None,
        "total_s": round(time.monotonic() - started, 4),
    }
    logger.info("%s", msgspec.json.encode(record).decode())
