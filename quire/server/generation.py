"""From a checked body to a running generation; shared by all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request

from quire.frontend.async_llm import OutputStream, RequestTerms
from quire.frontend.inputs import Prompt, TokenizationOptions
from quire.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from quire.frontend.pooling import PoolingParams
from quire.protocol.errors import ContextLengthError, RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.preparation.context import Preparation
from quire.server.state import ServerState

T = TypeVar("T")


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def tokenize(
    state: Preparation, prompts: list[Prompt], options: Mapping[str, Any], field: str = "prompt"
) -> None:
    """Fill in the token ids of prompts; `field` is where the body has them."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        state.inputs.tokenize(prompts, TokenizationOptions.from_kwargs(given))
    except ContextLengthError as error:
        error.field = field
        if len(prompts) == 1:  # the client knows of no list
            error.args = (str(error).removeprefix("prompts[0]: "),)
        raise


def check_max_tokens(
    state: Preparation, prompts: list[Prompt], max_tokens: int | None, name: str
) -> None:
    """Refuse a limit that allows no token, or that the context cannot hold; the field is called
    `name`."""
    if max_tokens is None:
        return
    if max_tokens < 1:
        raise RequestError(f"{name} must be at least 1, got {max_tokens}.")
    limit = state.inputs.max_model_len
    for prompt in prompts:
        assert prompt.token_ids is not None
        if max_tokens > limit - len(prompt.token_ids):
            raise ContextLengthError(limit, len(prompt.token_ids), max_tokens, name)


class Generation:
    """Requests that were made for one HTTP request, from their acceptance to their end."""

    def __init__(self, request: Request, stream: OutputStream) -> None:
        self._request = request
        self._stream = stream
        stream.reads_lazily = True
        request.state.made = stream.requests  # for what watches requests
        self._first: list[tuple[int, Any]] | None = None

    @classmethod
    async def start(
        cls,
        request: Request,
        prompts: list[Prompt],
        params: SamplingParams | PoolingParams | BeamSearchParams,
        name: str,
        terms: RequestTerms,
    ) -> Generation:
        """Hand prompts to the engine; returns once it has accepted them all."""
        state = state_of(request)
        return cls(request, await state.llm.open_stream(prompts, params, name, terms))

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

    async def news(self) -> AsyncGenerator[list[tuple[int, Any]], None]:
        """News as they come: outputs, and progress where that was asked for."""
        try:
            if self._first:
                yield self._first
            while news := await self._stream.read():
                yield news
        finally:
            self.close()


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]], work: Awaitable[T]
) -> T | None:
    """What `work` returns, or None if the client goes away first, which cancels it."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def until_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
