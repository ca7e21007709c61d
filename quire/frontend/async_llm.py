"""`AsyncLLM`: the asyncio API. Requests join and leave at any time; outputs come as made."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from quire.frontend.collector import OpenRequest
from quire.frontend.embedding import PoolingParams, checked_params, embedding_of
from quire.frontend.engine_client import EngineClient, ThreadEngineClient
from quire.frontend.inputs import Prompt, TokenizationOptions, parse_prompts
from quire.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from quire.frontend.session import Session, request_failure, start_session
from quire.frontend.tokenizer import Tokenizer
from quire.metrics.instruments import Metric, Readings
from quire.protocol.errors import EngineDeadError, RequestError, RequestTimeoutError
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.output import RequestProgress, StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.protocol.snapshot import EngineSnapshot


@dataclass(frozen=True)
class RequestTerms:
    """How the engine is to treat requests that were made together."""

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    wants_progress: bool = False


class OutputStream:
    """What comes of requests that were made together. Closing it aborts what is unfinished."""

    def __init__(self, llm: AsyncLLM, requests: list[OpenRequest], news: asyncio.Event) -> None:
        self._llm = llm
        self.requests = requests
        self._news = news
        self._unfinished = list(range(len(requests)))

    async def read(self) -> list[tuple[int, RequestOutput | RequestProgress]]:
        """Wait for news; returns (index of the prompt, news) pairs, or nothing at the end."""
        while self._unfinished:
            await self._news.wait()
            self._news.clear()
            if news := self._take():
                return news
        return []

    def _take(self) -> list[tuple[int, RequestOutput | RequestProgress]]:
        news: list[tuple[int, RequestOutput | RequestProgress]] = []
        done = False
        if all(request.timed_out for request in self.requests):
            raise RequestTimeoutError("timeout_s is over and the first token is not there yet.")
        for index in self._unfinished:
            request = self.requests[index]
            if request.error is not None:
                death = self._llm.client.death
                raise request_failure(request.error, death, request.is_own_fault)
            if request.progress is not None:
                news.append((index, request.progress))
                request.progress = None
            if request.has_news:
                done = done or request.finished
                news.append((index, request.read()))
        if done:
            self._unfinished = [i for i in self._unfinished if not self.requests[i].finished]
        return news

    async def embeddings(self, params: PoolingParams) -> list[EmbeddingRequestOutput]:
        """The vectors of pooling requests, once they are all there."""
        while await self.read():
            pass
        death = self._llm.client.death
        return [embedding_of(request, params, death) for request in self.requests]

    def close(self) -> None:
        for request in self.requests:
            self._llm.forget(request)


class AsyncLLM:
    """A model that answers many callers of one event loop at once. Arguments are `LLM`'s."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        session, core = start_session({"model": model, **arguments})
        self._attach(session, ThreadEngineClient(core))

    @classmethod
    def connected(cls, session: Session, client: EngineClient) -> AsyncLLM:
        """An API to an engine that runs already, wherever that is."""
        llm = cls.__new__(cls)
        llm._attach(session, client)
        return llm

    def _attach(self, session: Session, client: EngineClient) -> None:
        self.session = session
        self.client = client
        self.options = session.options
        self.model_config = session.model_config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, tuple[OpenRequest, asyncio.Event]] = {}
        """By the request's name in the engine; the event tells its reader of news."""

    @property
    def num_open(self) -> int:
        """Requests between their arrival and their last output."""
        return len(self._open)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt, as `output_kind` says. Leaving the loop aborts the request."""
        if lora_request is not None:
            raise RequestError(f"lora_request is not supported yet, got {lora_request!r}.")
        prompts = self._parse_one("generate", prompt, request_id, tokenization_kwargs)
        terms = RequestTerms(priority)
        stream = await self.open_stream(prompts, sampling_params, request_id, terms)
        try:
            while news := await stream.read():
                for _, output in news:
                    assert isinstance(output, RequestOutput), "no progress was asked for"
                    yield output
        finally:
            stream.close()

    async def embed(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt. Cancelling the call aborts the request."""
        params = checked_params(pooling_params, self.model_config.hidden_size)
        prompts = self._parse_one("embed", prompt, request_id, tokenization_kwargs)
        stream = await self.open_stream(prompts, params, request_id, RequestTerms(priority))
        try:
            return (await stream.embeddings(params))[0]
        finally:
            stream.close()

    async def open_stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | PoolingParams | BeamSearchParams | None = None,
        name: str | None = None,
        terms: RequestTerms | None = None,
    ) -> OutputStream:
        """Hand prompts that are tokenised already to the engine: all of them or none."""
        self._bind_loop()
        terms = terms or RequestTerms()
        task: dict[str, Any] = {}
        if isinstance(params, PoolingParams):
            task, params = {"pooling": params.pooling}, params.sampling()
        elif isinstance(params, BeamSearchParams):
            task, params = {"beams": params}, params.sampling()
        params = params or self.session.default_params
        news, requests = asyncio.Event(), list[OpenRequest]()
        prepared = self.session.inputs.prepare_params(params)
        made = [self._new_request(prompt, prepared, name, terms, task) for prompt in prompts]
        try:
            for new, prompt in zip(made, prompts, strict=True):
                known_as = name or f"quire-{new.key}"
                request = self.session.collector.open(
                    new, prompt.text, params.output_kind, known_as
                )
                self._open[new.request_id] = request, news
                requests.append(request)
            adds = [self.client.add(new) for new in made]
            if len(adds) == 1:
                await adds[0]
            else:
                await asyncio.gather(*adds)
        except BaseException:
            for request in requests:
                self.forget(request)
            raise
        return OutputStream(self, requests, news)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        for request in self._named(request_id):
            self.client.abort(request.engine_id)

    async def reset_prefix_cache(self) -> bool:
        return await self.client.command("reset_prefix_cache", bool)

    async def tell_vocabulary(self) -> None:
        """Give an engine that runs elsewhere what its grammars need; once for each engine."""
        vocabulary = dataclasses.asdict(self.session.vocabulary())
        with contextlib.suppress(EngineDeadError):  # the next engine is told anew
            await self.client.command("set_vocabulary", NoneType, **vocabulary)

    async def check_health(self) -> None:
        """Raise if the engine has stopped."""
        death = self.client.death
        if death is not None:
            raise EngineDeadError(f"the engine has stopped: {death}")

    async def get_metrics(self) -> list[Metric]:
        return (await self.client.command("read_metrics", Readings)).all

    async def snapshot(self, max_waiting: int = 256) -> EngineSnapshot:
        """The engine at this moment: blocks, requests, memory."""
        return await self.client.command("snapshot", EngineSnapshot, max_waiting=max_waiting)

    async def get_tokenizer(self) -> Tokenizer:
        return self.session.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.session.default_params.clone()

    def shutdown(self) -> None:
        """End all requests and free everything."""
        self.client.shutdown()

    # --- inside -----------------------------------------------------------------------------------

    def _parse_one(
        self,
        method: str,
        prompt: Any,
        request_id: str | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[Prompt]:
        """The prompt of a call for a single one, tokenised."""
        prompts = parse_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"{method} takes one prompt, got {len(prompts)}.")
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        self.session.inputs.tokenize(prompts, options)
        if request_id is not None and self._named(request_id):
            raise RequestError(f"request_id {request_id!r} is already in use.")
        return prompts

    def _named(self, name: str) -> list[OpenRequest]:
        return [request for request, _ in self._open.values() if request.request_id == name]

    def _new_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str | None,
        terms: RequestTerms,
        task: Mapping[str, Any],
    ) -> NewRequest:
        key, now = self.session.take_keys(params.n), time.monotonic()
        return self.session.inputs.new_request(
            key,
            str(key) if name is None else f"{name}{ID_SEPARATOR}{key}",
            prompt,
            params,
            arrival_time=now,
            priority=terms.priority,
            streams=params.output_kind is not RequestOutputKind.FINAL_ONLY,
            tenant=terms.tenant,
            deadline=None if terms.timeout_s is None else now + terms.timeout_s,
            wants_progress=terms.wants_progress,
            **task,
        )

    def _bind_loop(self) -> None:
        """Outputs go to the event loop of the callers; there can be one at a time."""
        loop, previous = asyncio.get_running_loop(), self._loop
        if previous is loop:
            return
        if previous is not None and not previous.is_closed() and self._open:
            raise RequestError(
                "AsyncLLM serves one event loop at a time, and another one has open requests; "
                "use one loop, or an AsyncLLM for each."
            )
        self._loop = loop
        self.client.listen(self, loop)

    def engine_died(self, reason: str) -> None:
        for request, news in self._open.values():
            request.error = reason
            news.set()

    def receive(self, output: StepOutput) -> None:
        changed, stopped = self.session.collector.process(output)
        for sequence in stopped:
            reason = sequence.finish_reason or "stop"
            self.client.abort(sequence.request.engine_id, reason, sequence.key)
        for request in changed:
            entry = self._open.get(request.engine_id)
            if entry is not None:
                entry[1].set()

    def forget(self, request: OpenRequest) -> None:
        """Nobody reads a request any more; it is aborted if it goes on."""
        if self._open.pop(request.engine_id, None) is None:
            return
        if not request.finished:
            self.client.abort(request.engine_id)
        self.session.collector.close(request)
