"""OpenAI batch files: one request per line in, one result per line out.

A line that cannot be run does not end the batch: its result says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.client.batch_results import ID_START, result_id
from quire.client.errors import reason

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TRY_AGAIN = frozenset({429, 500, 502, 503, 504})
"""Statuses that say nothing about the request: the server is full, starts, or has failed."""
MAX_TRIES = 50
"""Of one request, which may be what makes the server fail."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 15.0


@dataclass(frozen=True)
class BatchAnswer:
    status: int
    body: bytes
    request_id: str | None = None
    retry_after_s: float = 0.0
    """When the server wants to be asked again."""


Post = Callable[[str, bytes], Awaitable[BatchAnswer]]
"""Sends a body to a route; raises `OSError` if no answer comes."""
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
    already_done: int = 0
    """By an earlier run."""

    @property
    def has_failures(self) -> bool:
        return self.failed + self.bad_lines > 0

    def __str__(self) -> str:
        parts = [f"{self.completed} completed", f"{self.failed} failed"]
        if self.bad_lines:
            parts.append(f"{self.bad_lines} bad lines")
        if self.already_done:
            parts.append(f"{self.already_done} done before")
        return ", ".join(parts)


class Patience:
    """Whether it is worth to try again: while the server works on other requests of the batch, and
    for `limit_s` after it last answered one."""

    def __init__(self, limit_s: float) -> None:
        self.num_in_work = 0
        self._limit_s = limit_s
        self._last_answer = time.monotonic()

    def answered(self) -> None:
        self._last_answer = time.monotonic()

    @property
    def is_over(self) -> bool:
        return not self.num_in_work and time.monotonic() - self._last_answer >= self._limit_s


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
    lines: Iterable[bytes],
    post: Post,
    write: Write,
    concurrency: int,
    retry_for_s: float = 0.0,
    finished: Mapping[str, str] | None = None,
) -> BatchCounts:
    """Run all requests, `concurrency` at a time, and write each result as soon as it is there.
    Requests with a result in `finished` (custom id -> id of the result) are left out."""
    counts, patience, known = BatchCounts(), Patience(retry_for_s), finished or {}
    items = read_lines(lines)

    async def keep_posting() -> None:
        for item in items:
            if isinstance(item, BatchFault):
                counts.bad_lines += 1
                write(_result(item.custom_id, None, _error("invalid_line", item.message)))
            elif known.get(item.custom_id) == _id_of(item):
                counts.already_done += 1
            else:
                write(await _answer(item, post, patience, counts))

    tasks = [asyncio.ensure_future(keep_posting()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:  # such as where a result cannot be written
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return counts


async def _answer(
    request: BatchRequest, post: Post, patience: Patience, counts: BatchCounts
) -> dict[str, Any]:
    """The result of a request, tried again while the trouble is the server's."""
    body, wait_s = json.dumps(request.body).encode(), FIRST_WAIT_S
    for num_tries in range(1, MAX_TRIES + 1):
        answer = await _try(request.url, body, post, patience)
        is_final = isinstance(answer, BatchAnswer) and answer.status not in TRY_AGAIN
        if is_final:
            patience.answered()
        if is_final or num_tries == MAX_TRIES or patience.is_over:
            break
        asked_s = answer.retry_after_s if isinstance(answer, BatchAnswer) else 0.0
        # Not all at the same moment.
        await asyncio.sleep(min(max(wait_s, asked_s), LONGEST_WAIT_S) * random.uniform(0.5, 1.0))
        wait_s *= 2
    return _final(request, answer, counts)


async def _try(url: str, body: bytes, post: Post, patience: Patience) -> BatchAnswer | OSError:
    patience.num_in_work += 1
    try:
        return await post(url, body)
    except OSError as error:
        return error
    finally:
        patience.num_in_work -= 1


def _final(
    request: BatchRequest, answer: BatchAnswer | OSError, counts: BatchCounts
) -> dict[str, Any]:
    response = error = None
    try:
        if isinstance(answer, OSError):
            raise answer
        content = json.loads(answer.body)
    except (OSError, ValueError) as failure:
        error = _error("request_failed", reason(failure))
    else:
        name = content.get("id") if isinstance(content, dict) else None
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id or name,
            "body": content,
        }
    if response is not None and response["status_code"] == 200:
        counts.completed += 1
    else:
        counts.failed += 1
    return _result(request.custom_id, response, error, _id_of(request))


def _id_of(request: BatchRequest) -> str:
    return result_id(request.custom_id, request.url, request.body)


def _result(
    custom_id: str | None,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
    name: str | None = None,
) -> dict[str, Any]:
    return {
        "id": name or ID_START + uuid.uuid4().hex,
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}
