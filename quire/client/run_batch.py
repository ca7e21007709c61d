"""`quire run-batch`: a batch file through a running server, or through an engine started here."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.client.address import Address
from quire.client.batch import BatchAnswer, BatchCounts, Post, run_batch
from quire.client.batch_results import ResultFile
from quire.client.errors import no_answer, refused
from quire.protocol.errors import OptionError, RequestError

Poster = Callable[[], contextlib.AbstractAsyncContextManager[Post]]


@dataclass(frozen=True)
class BatchFiles:
    input_file: str
    output_file: str
    overwrite: bool = False
    """Start over, instead of going on from the results that are there."""


def run_file(files: BatchFiles, poster: Poster, concurrency: int, retry_for_s: float) -> int:
    """Run the batch; what could not be done is counted, and told in the output file."""
    source, target = Path(files.input_file), Path(files.output_file)
    if concurrency < 1:
        raise OptionError(f"--concurrency must be at least 1, got {concurrency}.")
    if not retry_for_s >= 0:
        raise OptionError(f"--retry-for must be at least 0 seconds, got {retry_for_s:g}.")
    if not source.is_file():
        raise RequestError(f"--input-file {str(source)!r} does not exist, or is no file.")
    if target.exists() and target.samefile(source):
        raise OptionError("--output-file must not be the --input-file, which it would overwrite.")
    counts = asyncio.run(_run(source, target, files.overwrite, poster, concurrency, retry_for_s))
    advice = ""
    if counts.has_failures:
        advice = "; the same command again keeps what is done and tries the rest"
    print(f"quire run-batch: {counts}; see {target}{advice}", file=sys.stderr)
    return 1 if counts.has_failures else 0


async def _run(
    source: Path,
    target: Path,
    overwrite: bool,
    poster: Poster,
    concurrency: int,
    retry_for_s: float,
) -> BatchCounts:
    with source.open("rb") as lines:
        async with ResultFile(target, overwrite) as results, poster() as post:
            if results.finished:
                known = len(results.finished)
                print(f"quire run-batch: {target} holds {known} results already", file=sys.stderr)
            return await run_batch(
                lines, post, results.append, concurrency, retry_for_s, results.finished
            )


@contextlib.asynccontextmanager
async def server_poster(url: str, api_key: str | None) -> AsyncIterator[Post]:
    """Posts to a running server, which is known to answer before the first line is read."""
    from quire.client.http import HttpClient

    client = HttpClient(Address.parse(url), api_key)

    async def post(path: str, body: bytes) -> BatchAnswer:
        answer = await client.post(path, body)
        return BatchAnswer(
            answer.status,
            answer.body,
            answer.headers.get("x-request-id"),
            _seconds(answer.headers.get("retry-after", "0")),
        )

    with contextlib.closing(client):
        try:
            answer = await client.get("/v1/models")
        except OSError as error:
            raise no_answer(client.address, error) from None
        if answer.status != 200:
            raise refused(client.address, answer.status, answer.body)
        yield post


def _seconds(text: str) -> float:
    """Of a Retry-After header; one that names a date says nothing here."""
    return float(text) if text.isdecimal() else 0.0


async def post_asgi(app: Any, path: str, body: bytes) -> BatchAnswer:
    """Posts to an ASGI application in this process: a server's routes without a socket."""
    length = str(len(body)).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", length),
        ],
        "client": None,
        "server": None,
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, pieces = 0, {}, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = headers.get(b"x-request-id")
    name = None if request_id is None else request_id.decode("latin-1")
    return BatchAnswer(status, b"".join(pieces), name)
