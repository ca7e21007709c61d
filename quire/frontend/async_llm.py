"""`AsyncLLM`: the asyncio API. Requests join and leave at any time; outputs come as made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.frontend.collector import OpenRequest
from quire.frontend.engine_client import EngineClient, ThreadEngineClient
from quire.frontend.inputs import Prompt, TokenizationOptions, parse_prompts
from quire.frontend.outputs import RequestOutput
from quire.frontend.session import Session, request_failure, start_session
from quire.frontend.tokenizer import Tokenizer
from quire.metrics.instruments import Metric, Readings
from quire.protocol.errors import EngineDeadError, RequestError
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import RequestOutputKind, SamplingParams


class OutputStream:
    """What comes of requests that were made together. Closing it aborts what is unfinished."""

    def __init__(self, llm: AsyncLLM, requests: list[OpenRequest], news: asyncio.Event) -> None:
        self._llm = llm
        self._requests = requests
        self._news = news
        self._unfinished = set(range(len(requests)))

    async def read(self) -> list[tuple[int, RequestOutput]]:
        """Wait for news; returns (index of the prompt, output) pairs, or nothing at the end."""
        while self._unfinished:
            await self._news.wait()
            self._news.clear()
            outputs = []
            for index in sorted(self._unfinished):
                request = self._requests[index]
                if request.error is not None:
                    raise request_failure(request.error, self._llm.client.death)
                if request.has_news:
                    if request.finished:
                        self._unfinished.remove(index)
                    outputs.append((index, request.read()))
            if outputs:
                return outputs
        return []

    def close(self) -> None:
        for request in self._requests:
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
        self._open: dict[str, OpenRequest] = {}
        self._news: dict[str, asyncio.Event] = {}

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
        prompts = parse_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"generate takes one prompt, got {len(prompts)}.")
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        self.session.inputs.tokenize(prompts, options)
        names = None if request_id is None else [request_id]
        stream = await self.open_stream(prompts, sampling_params, names, priority=priority)
        try:
            while outputs := await stream.read():
                yield outputs[0][1]
        finally:
            stream.close()

    async def open_stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        names: Sequence[str] | None = None,
        *,
        priority: int = 0,
    ) -> OutputStream:
        """Hand prompts that are tokenised already to the engine: all of them or none."""
        self._bind_loop()
        params = params or self.session.default_params
        news, requests = asyncio.Event(), list[OpenRequest]()
        prepared = self.session.inputs.prepare_params(params)
        made = [self._new_request(prompt, prepared, priority) for prompt in prompts]
        try:
            for i, (new, prompt) in enumerate(zip(made, prompts, strict=True)):
                name = f"quire-{new.key}" if names is None else names[i]
                requests.append(self._listen(new, prompt, params.output_kind, name, news))
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
        request = self._open.get(request_id)
        if request is not None:
            self.client.abort(request.engine_id)

    async def reset_prefix_cache(self) -> bool:
        return await self.client.command("reset_prefix_cache", bool)

    async def check_health(self) -> None:
        """Raise if the engine has stopped."""
        death = self.client.death
        if death is not None:
            raise EngineDeadError(f"the engine has stopped: {death}")

    async def get_metrics(self) -> list[Metric]:
        return (await self.client.command("read_metrics", Readings)).all

    async def get_tokenizer(self) -> Tokenizer:
        return self.session.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.session.default_params.clone()

    def shutdown(self) -> None:
        """End all requests and free everything."""
        self.client.shutdown()

    # --- inside -----------------------------------------------------------------------------------

    def _new_request(self, prompt: Prompt, params: SamplingParams, priority: int) -> NewRequest:
        key = self.session.take_keys(params.n)
        return self.session.inputs.new_request(
            key,
            str(key),
            prompt,
            params,
            arrival_time=time.monotonic(),
            priority=priority,
            streams=params.output_kind is not RequestOutputKind.FINAL_ONLY,
        )

    def _listen(
        self,
        new: NewRequest,
        prompt: Prompt,
        kind: RequestOutputKind,
        name: str,
        news: asyncio.Event,
    ) -> OpenRequest:
        if name in self._open:
            raise RequestError(f"request_id {name!r} is already in use.")
        request = self.session.collector.open(new, prompt.text, kind, name)
        self._open[name], self._news[name] = request, news
        return request

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
        for request in self._open.values():
            request.error = reason
            self._news[request.request_id].set()

    def receive(self, output: StepOutput) -> None:
        changed, stopped = self.session.collector.process(output)
        for sequence in stopped:
            reason = sequence.finish_reason or "stop"
            self.client.abort(sequence.request.engine_id, reason, sequence.key)
        for request in changed:
            news = self._news.get(request.request_id)
            if news is not None:
                news.set()

    def forget(self, request: OpenRequest) -> None:
        """Nobody reads a request any more; it is aborted if it goes on."""
        if self._open.get(request.request_id) is not request:
            return
        if not request.finished:
            self.client.abort(request.engine_id)
        self.session.collector.close(request)
        del self._open[request.request_id], self._news[request.request_id]
