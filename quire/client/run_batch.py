"""`quire run-batch`: a batch file through a running server, or through an engine started here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from quire.client.address import Address
from quire.client.batch import BatchCounts, Post, run_batch
from quire.client.errors import no_answer, refused
from quire.protocol.errors import OptionError, RequestError

Poster = Callable[[], contextlib.AbstractAsyncContextManager[Post]]


def run_file(input_file: str, output_file: str, poster: Poster, concurrency: int) -> int:
    """Run the batch; what could not be done is counted, and told in the output file."""
    source, target = Path(input_file), Path(output_file)
    if concurrency < 1:
        raise OptionError(f"--concurrency must be at least 1, got {concurrency}.")
    if not source.is_file():
        raise RequestError(f"--input-file {str(source)!r} does not exist, or is no file.")
    if target.exists() and target.samefile(source):
        raise OptionError("--output-file must not be the --input-file, which it would overwrite.")
    counts = asyncio.run(_run(source, target, poster, concurrency))
    print(f"quire run-batch: {counts}; see {target}", file=sys.stderr)
    return 0


async def _run(source: Path, target: Path, poster: Poster, concurrency: int) -> BatchCounts:
    # Half a character, which JSON may hold and UTF-8 may not, stays the escape that it was.
    with (
        source.open("rb") as lines,
        target.open("w", encoding="utf-8", errors="backslashreplace") as results,
    ):

        def write(result: dict[str, Any]) -> None:
            results.write(json.dumps(result, ensure_ascii=False) + "\n")
            results.flush()

        async with poster() as post:
            return await run_batch(lines, post, write, concurrency)


@contextlib.asynccontextmanager
async def server_poster(url: str, api_key: str | None) -> AsyncIterator[Post]:
    """Posts to a running server, which is known to answer before the first line is read."""
    from quire.client.http import HttpClient

    client = HttpClient(Address.parse(url), api_key)

    async def post(path: str, body: bytes) -> tuple[int, bytes, str | None]:
        answer = await client.post(path, body)
        return answer.status, answer.body, answer.headers.get("x-request-id")

    with contextlib.closing(client):
        try:
            answer = await client.get("/v1/models")
        except OSError as error:
            raise no_answer(client.address, error) from None
        if answer.status != 200:
            raise refused(client.address, answer.status, answer.body)
        yield post
