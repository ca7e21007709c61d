"""`Generation`: the engine's work for one HTTP request, from its start to the reply; shared by all
protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from quire.frontend.async_llm import OutputStream
from quire.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from quire.frontend.pooling import PoolingParams
from quire.server.http.reply import (
    CLIENT_LEFT,
    EventStream,
    encoded,
    num_values,
    off_loop,
    unless_disconnected,
)
from quire.server.preparation.prepare import Prepared
from quire.server.state import state_of


class Reply(Protocol):
    """Writes what came of a generation in the format of its protocol."""

    id: str

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it at once."""

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Server-sent events as it comes."""


class Generation:
    def __init__(self, request: Request, stream: OutputStream) -> None:
        self._request = request
        self._stream = stream
        stream.reads_lazily = True
        request.state.made = stream.requests  # for what watches requests
        self._first: list[tuple[int, Any]] | None = None

    @classmethod
    async def start(
        cls, request: Request, made: Prepared, name: str, wants_progress: bool = False
    ) -> Generation:
        """Hand prompts to the engine; returns once it has accepted them all."""
        terms = made.body.terms(request.state.tenant, wants_progress)
        llm = state_of(request).llm
        return cls(request, await llm.open_stream(made.prompts, made.params, name, terms))

    async def news(self) -> AsyncGenerator[list[tuple[int, Any]], None]:
        """News as they come: outputs, and progress where that was asked for."""
        try:
            if self._first:
                yield self._first
            while news := await self._stream.read():
                yield news
        finally:
            self.close()

    async def embeddings(self, params: PoolingParams) -> list[EmbeddingRequestOutput] | None:
        """The vectors in the order of the prompts; None if the client left."""
        try:
            work = self._stream.embeddings(params)
            return await unless_disconnected(self._request.receive, work)
        finally:
            self.close()

    def close(self) -> None:
        """The client has left: what is unfinished is aborted."""
        self._stream.close()

    async def outputs(self) -> list[RequestOutput] | None:
        """All outputs at the end, in the order of the prompts; None if the client left."""

        async def collect() -> list[RequestOutput]:
            found: dict[int, RequestOutput] = {}
            while news := await self._stream.read():
                found.update(news)  # type: ignore[arg-type]
            return [found[index] for index in sorted(found)]

        try:
            return await unless_disconnected(self._request.receive, collect())
        finally:
            self.close()

    async def begin(self) -> bool:
        """Wait for the first news, so that a request which fails before gets a status of its own
        instead of an event; False if the client left."""
        try:
            self._first = await unless_disconnected(self._request.receive, self._stream.read())
        except BaseException:
            self.close()
            raise
        if self._first is None:
            self.close()
        return self._first is not None


async def answer(
    request: Request, made: Prepared, reply: Reply, wants_progress: bool = False, **ending: Any
) -> Response:
    """The response to a request. The status of a stream waits for its first news, unless these are
    progress; `ending` is what `EventStream` must know about the protocol."""
    generation = await Generation.start(request, made, reply.id, wants_progress)
    if made.body.stream:
        if not wants_progress and not await generation.begin():
            return Response(status_code=CLIENT_LEFT)
        return EventStream(reply.events(generation), generation.close, **ending)
    outputs = await generation.outputs()
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    data = await off_loop(num_values(outputs), lambda: encoded(reply.whole(outputs)))
    return Response(data, media_type="application/json")
