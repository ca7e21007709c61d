"""Sends a load to a server and records what came back, request by request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import msgspec

from quire.bench.serving.arrivals import Load
from quire.bench.serving.backends import Backend, Question
from quire.bench.serving.prompts import Prompts
from quire.bench.serving.streams import TokenStream
from quire.bench.serving.workload import LoadRequest
from quire.client.errors import error_message, reason
from quire.client.http import HttpClient


@dataclass
class Record:
    """What became of one request; times are those of `perf_counter`."""

    request: LoadRequest
    sent_s: float
    late_s: float
    """How much later than planned it was sent."""
    end_s: float = 0.0
    times: list[float] = field(default_factory=list)
    """Arrivals of the pieces of its stream."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    texts: list[str] = field(default_factory=list)
    failure: str | None = None
    """What kind of failure it was, if it was one."""
    detail: str = ""


@dataclass(frozen=True)
class LoadRun:
    """All requests of one load."""

    load: Load
    records: list[Record]
    seconds: float
    """From the first request sent to the last answer."""
    cpu_s: float
    """CPU time of this process meanwhile."""


@dataclass(frozen=True)
class Target:
    """The server under load, and how it is spoken to."""

    client: HttpClient
    backend: Backend
    model: str
    prompts: Prompts
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields to add to each body or, with the value null, to leave out."""
    keeps_text: bool = False

    def body(self, request: LoadRequest) -> bytes:
        question = Question(
            self.model, self.prompts.make(request), request.num_output_tokens, self.ignore_eos
        )
        body = self.backend.body(question) | self.extra_body
        return msgspec.json.encode({name: body[name] for name in body if body[name] is not None})

    async def ask(self, request: LoadRequest, body: bytes, late_s: float = 0.0) -> Record:
        """Send one request and read its answer to the end."""
        stream = TokenStream(self.backend.read_event, self.keeps_text)
        record = Record(request, perf_counter(), late_s, times=stream.times, texts=stream.texts)
        try:
            answer = await self.client.post(self.backend.route(self.model), body, stream.receive)
        except TimeoutError:
            record.failure = "timeout"
        except OSError as error:
            record.failure, record.detail = _connection_failure(error), reason(error)
        else:
            stream.end()
            if answer.status != 200:
                record.failure = f"HTTP {answer.status}"
                record.detail = error_message(answer.body)
            elif stream.error:
                record.failure, record.detail = "error in the stream", stream.error
            elif self.backend.marks_end and not stream.is_complete:
                record.failure = "stream without an end"
            elif not stream.times:
                record.failure = "no tokens"
        record.end_s = perf_counter()
        record.num_input_tokens = stream.num_input_tokens
        record.num_output_tokens = stream.num_output_tokens
        return record


def _connection_failure(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "connection lost" if isinstance(error, ConnectionError) else "no connection"


async def run_load(
    target: Target,
    load: Load,
    requests: Sequence[LoadRequest],
    seed: int,
    on_record: Callable[[Record], None] = lambda record: None,
) -> LoadRun:
    """Send all requests as the load has it, and wait for all answers."""
    schedule = load.schedule(requests, seed)
    with _no_collections():
        cpu_started = process_time()
        if schedule is None:
            records = await _send_in_turns(target, requests, int(load.value), on_record)
        else:
            records = await _send_on_time(target, requests, schedule, on_record)
        cpu_s = process_time() - cpu_started
    seconds = max(record.end_s for record in records) - min(record.sent_s for record in records)
    return LoadRun(load, records, seconds, cpu_s)


async def _send_in_turns(
    target: Target, requests: Sequence[LoadRequest], concurrency: int, on_record: Any
) -> list[Record]:
    records: list[Record] = []
    waiting: Iterator[LoadRequest] = iter(requests)

    async def keep_asking() -> None:
        for request in waiting:
            record = await target.ask(request, target.body(request))
            records.append(record)
            on_record(record)

    await asyncio.gather(*(keep_asking() for _ in range(min(concurrency, len(requests)))))
    return records


async def _send_on_time(
    target: Target, requests: Sequence[LoadRequest], schedule: Sequence[float], on_record: Any
) -> list[Record]:
    records: list[Record] = []

    async def ask(request: LoadRequest, body: bytes, late_s: float) -> None:
        record = await target.ask(request, body, late_s)
        records.append(record)
        on_record(record)

    tasks = []
    body = target.body(requests[0])
    started = perf_counter()
    for index, (request, due) in enumerate(zip(requests, schedule, strict=True)):
        wait = started + due - perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        elif index % 16 == 0:
            await asyncio.sleep(0)  # answers must be read also while many are sent at once
        tasks.append(
            asyncio.create_task(ask(request, body, max(perf_counter() - started - due, 0)))
        )
        if index + 1 < len(requests):
            body = target.body(requests[index + 1])  # in the time until it is due
    await asyncio.gather(*tasks)
    return records


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A collection would show as a pause of the server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
