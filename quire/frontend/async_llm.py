"""`AsyncLLM`: the asyncio API. Requests join and leave at any time; outputs come as made."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from threading import Lock
from types import NoneType
from typing import TYPE_CHECKING, Any

from quire.config.resolve import refuse_launched_outside
from quire.frontend.engine_client import EngineClient, ThreadEngineClient
from quire.frontend.inputs import (
    Prompt,
    RequestTerms,
    TokenizationOptions,
    adapters_per_prompt,
    parse_prompts,
)
from quire.frontend.output_processor import OpenRequest, OutputProcessor
from quire.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from quire.frontend.pooling import PoolingParams, checked_params
from quire.frontend.session import Session, start_session
from quire.metrics.instruments import Metric, Readings
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import (
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from quire.protocol.output import EngineSnapshot, RequestProgress, StepOutput
from quire.protocol.request import KEY_BITS, NewRequest
from quire.protocol.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.config.resolve import refuse_launched_outside
from quire.config.engine_args import EngineArgs

DISPLACED_RETRY_S = 10.0


AT_ONCE = 32
"""Requests that are made before others of the same event loop have a turn."""


class LoopRequests:
    """The open requests of one event loop. They belong to its thread: other loops have their own,
    and share the engine only."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, index: int) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.open: dict[str, tuple[OpenRequest, asyncio.Event]] = {}
        """By the request's name in the engine; the event wakes its reader."""
        self.index = index
        self.first_key = index << KEY_BITS
        """What is added to the keys of its sequences, so that the engine knows whose they are."""
        self._client = client

    def receive(self, output: StepOutput) -> None:
        changed, stopped = self.processor.process(output)
        for sequence in stopped:
            reason = sequence.finish_reason or "stop"
            self._client.abort(sequence.request.engine_id, reason, sequence.key)
        for request in changed:
            entry = self.open.get(request.engine_id)
            if entry is not None:
                entry[1].set()

    def engine_died(self, reason: str) -> None:
        for request, changed in self.open.values():
            request.error = reason
            changed.set()

    def forget(self, request: OpenRequest) -> None:
        """No reader is left for a request; it is aborted if it goes on."""
        if self.open.pop(request.engine_id, None) is None:
            return
        if not request.finished:
            self._client.abort(request.engine_id)
        self.processor.close(request)


class OutputStream:
    """What comes of requests that were made together. Closing it aborts what is unfinished."""

    def __init__(
        self,
        client: EngineClient,
        owner: LoopRequests,
        requests: list[OpenRequest],
        changed: asyncio.Event,
    ) -> None:
        self._client = client
        self._owner = owner
        self.requests = requests
        self._changed = changed
        self.reads_lazily = False
        """Whether outputs leave it to their reader to make objects of logprobs of prompts."""
        self._unfinished = list(range(len(requests)))
        self._first: list[tuple[int, RequestOutput | RequestProgress]] = []

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[tuple[int, Any]]:
        """As `read`; `RequestProgress` comes only where it was asked for."""
        outputs = await self.read()
        if not outputs:
            raise StopAsyncIteration
        return outputs

    async def begin(self) -> bool:
        """Wait for the first outputs, which are read later; raises if there will be none."""
        self._first = await self.read()
        return True

    async def outputs(self) -> list[RequestOutput]:
        """The last output of each prompt, in their order."""
        found: dict[int, RequestOutput] = {}
        async for outputs in self:
            found.update(outputs)
        return [found[index] for index in sorted(found)]

    async def read(self) -> list[tuple[int, RequestOutput | RequestProgress]]:
        """Wait for outputs; returns (index of the prompt, output) pairs, or nothing at the end."""
        if self._first:
            first, self._first = self._first, []
            return first
        while self._unfinished:
            await self._changed.wait()
            self._changed.clear()
            if outputs := self._take():
                return outputs
        return []

    def _take(self) -> list[tuple[int, RequestOutput | RequestProgress]]:
        outputs: list[tuple[int, RequestOutput | RequestProgress]] = []
        done = False
        if all(request.timed_out for request in self.requests):
            raise RequestTimeoutError("timeout_s is over and the first token is not there yet.")
        if any(request.was_displaced for request in self.requests):
            raise OverloadedError(
                "the engine is overloaded: requests of tenants that were there before take the "
                "place of this one in the queue. Try again later.",
                retry_after_s=DISPLACED_RETRY_S,
            )
        for index in self._unfinished:
            request = self.requests[index]
            if request.error is not None:
                raise request.failure(self._client.death)
            if request.progress is not None:
                outputs.append((index, request.progress))
                request.progress = None
            if request.has_output:
                done = done or request.finished
                outputs.append((index, request.read(self.reads_lazily)))
        if done:
            self._unfinished = [i for i in self._unfinished if not self.requests[i].finished]
        return outputs

    async def embeddings(self, params: PoolingParams) -> list[EmbeddingRequestOutput]:
        """The vectors of pooling requests, once they are all there."""
        while await self.read():
            pass
        death = self._client.death

        def vectors() -> list[EmbeddingRequestOutput]:
            return [request.read_embedding(params, death) for request in self.requests]

        return await asyncio.to_thread(vectors) if len(self.requests) > AT_ONCE else vectors()

    def close(self) -> None:
        for request in self.requests:
            self._owner.forget(request)


class AsyncLLM:
    """A model that answers many callers at once, of one event loop or of several in their own
    threads. Arguments are `LLM`'s."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        refuse_launched_outside(arguments.get("distributed_executor_backend"), "AsyncLLM")
        session, core = start_session({"model": model, **arguments})
        self._attach(session, ThreadEngineClient(core))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> AsyncLLM:
        """What else vLLM takes here (usage context, loggers) has no effect."""
        return cls(**dataclasses.asdict(engine_args))  # type: ignore[call-overload]

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
        self._loops: dict[asyncio.AbstractEventLoop, LoopRequests] = {}
        self._loops_lock = Lock()

    @property
    def num_open(self) -> int:
        """Requests between their arrival and their last output."""
        return sum(len(loop.open) for loop in list(self._loops.values()))

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
        (adapter,) = adapters_per_prompt(lora_request, 1)
        prompts = self._parse_one("generate", prompt, request_id, tokenization_kwargs)
        terms = RequestTerms(priority, adapter=adapter)
        stream = await self.open_stream(prompts, sampling_params, request_id, terms)
        try:
            async for outputs in stream:
                for _, output in outputs:
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
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt. Cancelling the call aborts the request."""
        (adapter,) = adapters_per_prompt(lora_request, 1)
        params = checked_params(pooling_params, self.model_config.hidden_size)
        prompts = self._parse_one("embed", prompt, request_id, tokenization_kwargs)
        terms = RequestTerms(priority, adapter=adapter)
        stream = await self.open_stream(prompts, params, request_id, terms)
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
        here = self._requests_here()
        terms = terms or RequestTerms()
        task: dict[str, Any] = {}
        if isinstance(params, PoolingParams):
            task, params = {"pooling": params.pooling}, params.sampling()
        elif isinstance(params, BeamSearchParams):
            task, params = {"beams": params}, params.sampling()
        params = params or self.session.default_params
        changed, requests = asyncio.Event(), list[OpenRequest]()
        prepared = self.session.inputs.prepare_params(params)
        made, adds = list[NewRequest](), list[asyncio.Future[None]]()
        try:
            for prompt in prompts:
                new = self.session.inputs.new_request(
                    prompt,
                    prepared,
                    terms,
                    arrival_time=time.monotonic(),
                    name=name,
                    first_key=here.first_key,
                    streams=params.output_kind is not RequestOutputKind.FINAL_ONLY,
                    adapter=terms.adapter,
                    **task,
                )
                made.append(new)
                known_as = name or f"quire-{new.key}"
                request = here.processor.open(new, prompt.text, params.output_kind, known_as)
                here.open[new.request_id] = request, changed
                requests.append(request)
                if len(made) % AT_ONCE == 0:
                    await asyncio.sleep(0)
            if len(made) == 1:
                await self.client.add(made[0])
            for first in range(0, len(made) if len(made) > 1 else 0, AT_ONCE):
                part = made[first : first + AT_ONCE]
                adds += [asyncio.ensure_future(self.client.add(new)) for new in part]
                await asyncio.sleep(0)
            await asyncio.gather(*adds)
        except BaseException:
            for request in requests:
                here.forget(request)
            for add in adds:
                add.cancel()
            await asyncio.gather(*adds, return_exceptions=True)
            raise
        return OutputStream(self.client, here, requests, changed)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        for request in self._named(request_id):
            self.client.abort(request.engine_id)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into host memory before it is asked for; raises if it cannot be used."""
        await self.client.command(
            "load_adapter",
            NoneType,
            lora_name=lora_request.lora_name,
            lora_int_id=lora_request.lora_int_id,
            lora_path=lora_request.lora_path,
            load_inplace=lora_request.load_inplace,
        )
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it go on. Whether there was one."""
        return await self.client.command("unload_adapter", bool, lora_int_id=lora_id)

    async def list_loras(self) -> set[int]:
        """`lora_int_id`s of the adapters in host memory."""
        return set(await self.client.command("list_adapters", list[int]))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter on the device, unless another could not run otherwise."""
        return await self.client.command("pin_adapter", bool, lora_int_id=lora_id)

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
        return [
            request
            for loop in list(self._loops.values())
            for request, _ in list(loop.open.values())
            if request.request_id == name
        ]

    def _requests_here(self) -> LoopRequests:
        """Those of the event loop that this runs on, which the engine reports to from now on."""
        loop = asyncio.get_running_loop()
        found = self._loops.get(loop)
        if found is None:
            with self._loops_lock:
                for other in [one for one in self._loops if one.is_closed()]:
                    closed = self._loops.pop(other)
                    for request, _ in list(closed.open.values()):
                        closed.forget(request)  # no reader comes back
                taken = {one.index for one in self._loops.values()}
                index = next(index for index in count() if index not in taken)
                found = LoopRequests(self.client, self.session.inputs.tokenizer, index)
                self.client.listen(found, loop, index)
                self._loops[loop] = found
        return found


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
