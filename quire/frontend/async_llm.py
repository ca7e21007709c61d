"""`AsyncLLM`: the asyncio API. Requests join and leave at any time; outputs come as made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from quire.engine.core import EngineCore
from quire.frontend.collector import OpenRequest, OpenSequence
from quire.frontend.engine_client import ThreadEngineClient
from quire.frontend.inputs import Prompt, TokenizationOptions, parse_prompts
from quire.frontend.outputs import RequestOutput
from quire.frontend.session import Session
from quire.frontend.tokenizer import Tokenizer
from quire.metrics.instruments import Metric
from quire.protocol.errors import EngineDeadError, RequestError
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams


class AsyncLLM:
    """A model that answers many callers of one event loop at once. Arguments are `LLM`'s."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self._session = Session({"model": model, **arguments})
        self.options = self._session.options
        self.model_config = self._session.model_config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, OpenRequest] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._client = ThreadEngineClient(self._session.core, self._deliver, self._deliver_death)

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
        self._session.inputs.tokenize(prompts, options)
        request = await self._submit(prompts[0], sampling_params, request_id, priority)
        news = self._news[request.request_id]
        try:
            done = False
            while not done:
                await news.wait()
                news.clear()
                if request.error is not None:
                    raise self._session.failure(request.error)
                if request.has_news:
                    done = request.finished
                    yield request.read()
        finally:
            self._forget(request)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        request = self._open.get(request_id)
        if request is not None:
            await self._call(lambda core: core.abort(request.engine_id))

    async def reset_prefix_cache(self) -> bool:
        await self._call(lambda core: core.scheduler.reset_prefix_cache())
        return True

    async def check_health(self) -> None:
        """Raise if the engine has stopped."""
        death = self._session.core.death
        if death is not None:
            raise EngineDeadError(f"the engine has stopped: {death}")

    async def get_metrics(self) -> list[Metric]:
        metrics: list[Metric] = await self._call(lambda core: core.read_metrics())
        return metrics

    async def get_tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._session.default_params.clone()

    def shutdown(self) -> None:
        """End all requests and free everything."""
        self._client.shutdown()

    # --- inside -----------------------------------------------------------------------------------

    async def _submit(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> OpenRequest:
        self._bind_loop()
        params = params or self._session.default_params
        key = self._session.take_keys(params.n)
        name = request_id or f"quire-{key}"
        if name in self._open:
            raise RequestError(f"request_id {name!r} is already in use.")
        new: NewRequest = self._session.inputs.new_request(
            key,
            str(key),
            prompt,
            self._session.inputs.prepare_params(params),
            arrival_time=self._session.core.clock(),
            priority=priority,
            streams=params.output_kind is not params.output_kind.FINAL_ONLY,
        )
        request = self._session.collector.open(new, prompt.text, params.output_kind, name)
        self._open[name], self._news[name] = request, asyncio.Event()
        try:
            await self._call(lambda core: core.add(new))
        except BaseException:
            self._forget(request)
            raise
        return request

    def _bind_loop(self) -> None:
        """Outputs go to the event loop of the callers; there can be one at a time."""
        loop, previous = asyncio.get_running_loop(), self._loop
        if (
            previous is not None
            and previous is not loop
            and not previous.is_closed()
            and self._open
        ):
            raise RequestError(
                "AsyncLLM serves one event loop at a time, and another one has open requests; "
                "use one loop, or an AsyncLLM for each."
            )
        self._loop = loop

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._client.call(function))

    def _deliver(self, output: StepOutput) -> None:
        """Called on the engine's thread: pass the output on to the event loop."""
        self._on_loop(self._receive, output)

    def _deliver_death(self, reason: str) -> None:
        self._on_loop(self._fail_all, reason)

    def _on_loop(self, function: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, argument)

    def _fail_all(self, reason: str) -> None:
        for request in self._open.values():
            request.error = reason
            self._news[request.request_id].set()

    def _receive(self, output: StepOutput) -> None:
        changed, stopped = self._session.collector.process(output)
        for sequence in stopped:
            self._client.call(partial(_stop, sequence))
        for request in changed:
            news = self._news.get(request.request_id)
            if news is not None:
                news.set()

    def _forget(self, request: OpenRequest) -> None:
        if not request.finished:
            self._client.call(lambda core: core.abort(request.engine_id))
        self._session.collector.close(request)
        self._open.pop(request.request_id, None)
        self._news.pop(request.request_id, None)


def _stop(sequence: OpenSequence, core: EngineCore) -> None:
    core.abort(sequence.request.engine_id, sequence.finish_reason or "stop", sequence.key)
