"""OpenAI batch files: one request per line in, one result per line out.

A line that cannot be run does not end the batch: its result says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.client.errors import reason

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes, str | None]]]
"""Sends a body to a route; returns status, body and request id of the answer."""
Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchFault:
    """A line that is no request."""

    custom_id: str | None
    message: str


@dataclass
class BatchCounts:
    completed: int = 0
    failed: int = 0
    """Refused or failed by the server."""
    bad_lines: int = 0

    def __str__(self) -> str:
        parts = [f"{self.completed} completed", f"{self.failed} failed"]
        return ", ".join([*parts, f"{self.bad_lines} bad lines"] if self.bad_lines else parts)


def read_lines(lines: Iterable[bytes]) -> Iterator[BatchRequest | BatchFault]:
    """What each line asks for; empty lines are skipped."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            item = _read_line(number, line, seen)
            if isinstance(item, BatchRequest):
                seen.add(item.custom_id)
            yield item


def _read_line(number: int, line: bytes, seen: set[str]) -> BatchRequest | BatchFault:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchFault(None, f"line {number} is not JSON ({error}).")
    if not isinstance(content, dict):
        return BatchFault(None, f"line {number} must be a JSON object.")
    custom_id, method = content.get("custom_id"), content.get("method")
    url: Any = content.get("url")
    body: Any = content.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchFault(None, f"line {number}: custom_id must be a text, got {custom_id!r}.")
    wrong = None
    if custom_id in seen:
        wrong = f"custom_id {custom_id!r} was used before; each must be unique."
    elif method != "POST":
        wrong = f'method must be "POST", got {method!r}.'
    elif url not in URLS:
        wrong = f"url must be one of {', '.join(URLS)}, got {url!r}."
    elif not isinstance(body, dict):
        wrong = f"body must be a JSON object, got {body!r}."
    elif body.get("stream"):
        wrong = "body.stream must be left out: a batch has whole answers."
    if wrong is not None:
        return BatchFault(custom_id, f"line {number}: {wrong}")
    return BatchRequest(custom_id, url, body)


async def run_batch(
    lines: Iterable[bytes], post: Post, write: Write, concurrency: int
) -> BatchCounts:
    """Run all requests, `concurrency` at a time, and write each result as soon as it is there."""
    counts = BatchCounts()
    items = read_lines(lines)

    async def keep_posting() -> None:
        for item in items:
            if isinstance(item, BatchFault):
                counts.bad_lines += 1
                write(_result(item.custom_id, None, _error("invalid_line", item.message)))
            else:
                write(await _answer(item, post, counts))

    await asyncio.gather(*(keep_posting() for _ in range(concurrency)))
    return counts


async def _answer(request: BatchRequest, post: Post, counts: BatchCounts) -> dict[str, Any]:
    try:
        status, body, request_id = await post(request.url, json.dumps(request.body).encode())
        content = json.loads(body)
    except (OSError, ValueError) as error:
        counts.failed += 1
        return _result(request.custom_id, None, _error("request_failed", reason(error)))
    if status == 200:
        counts.completed += 1
    else:
        counts.failed += 1
    response = {
        "status_code": status,
        "request_id": request_id or (content.get("id") if isinstance(content, dict) else None),
        "body": content,
    }
    return _result(request.custom_id, response, None)


def _result(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}
