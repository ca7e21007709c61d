"""`LLM`: the offline Python API. Prompts in, finished texts out, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.engine.structured_output.compiler import Compilation
from quire.frontend.inputs import (
    Params,
    Prompt,
    RequestTerms,
    TokenizationOptions,
    adapters_per_prompt,
    naming_index,
    params_per_prompt,
    parse_prompts,
)
from quire.frontend.output_processor import OpenRequest, OutputProcessor
from quire.frontend.outputs import BeamSearchOutput, EmbeddingRequestOutput, RequestOutput
from quire.frontend.pooling import PoolingParams, checked_params
from quire.frontend.session import start_session
from quire.frontend.step_loop import StepLoop, no_full_collections
from quire.metrics.engine import EngineStatistics
from quire.metrics.instruments import Metric
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.request import NewRequest
from quire.protocol.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.config.engine_args import EngineArgs
    from quire.config.model import ModelConfig

TOKENS_TO_START_WITH = 2048
"""Prompt tokens that keep a GPU busy while further requests are taken in."""
COMPILED_AHEAD = 64
TAKEN_AT_ONCE = 128
"""Requests that are checked or added before other threads' steps get a turn."""


class ProgressBar:
    """tqdm over prompts; silent where it is not wanted, or tqdm is not installed."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar: Any = None
        self._started = time.perf_counter()
        self._num_in = self._num_out = 0
        if enabled:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)

    def add(self, request: OpenRequest) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._num_in += len(request.prompt_token_ids)
        self._num_out += sum(len(sequence.token_ids) for sequence in request.sequences)
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_in / elapsed:.1f} tok/s, "
            f"output: {self._num_out / elapsed:.1f} tok/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _refused(name: str, reason: str) -> Any:
    def method(self: LLM, *args: Any, **kwargs: Any) -> Any:
        raise QuireError(f"LLM.{name} is not supported yet: {reason}.")

    method.__name__ = name
    method.__doc__ = f"Not supported yet: {reason}."
    return method


class LLM:
    """A model ready to generate. Arguments are vLLM's; without a model the embedded one is used.

    Threads may call it at the same time: their requests run in the same batches.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self._session, self._core = start_session({"model": model, **arguments})
        self._inputs = self._session.inputs
        self._loop = StepLoop(self._core, OutputProcessor(self._inputs.tokenizer))
        self.options = self._session.options
        self.model_config = self._session.model_config
        self._enqueued: list[OpenRequest] = []
        self._llm_engine: LLMEngine | None = None
        # Processes of ranks end with the object; where there are none, nothing else holds the
        # worker.
        ending = weakref.finalize(self, self._core.free_workers)
        ending.atexit = False

    # --- generating -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, lists of token ids, `{"prompt": ...}` or
        `{"prompt_token_ids": ...}`, one or many. Outputs come in the order of the prompts.
        `lora_request` is an adapter for all of them, or a list with one, or None, for each."""
        _refuse_extras(mm_processor_kwargs=mm_processor_kwargs)
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        parsed = parse_prompts(prompts)
        return self._complete(parsed, sampling_params, priority, options, use_tqdm, lora_request)

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several."""
        _refuse_extras(mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._session.inputs.render_chats(
            messages,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        options = TokenizationOptions.from_kwargs(tokenization_kwargs, add_special_tokens=False)
        return self._complete(prompts, sampling_params, priority, options, use_tqdm, lora_request)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding new text as it comes (or as `output_kind` says)."""
        options = TokenizationOptions()
        return self._stream(parse_prompts(prompt), sampling_params, options, lora_request)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding new text as it comes."""
        options = TokenizationOptions(add_special_tokens=False)
        prompts = self._session.inputs.render_chats(messages, **template_options)
        return self._stream(prompts, sampling_params, options, lora_request)

    def enqueue(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Take prompts in without waiting; `wait_for_completion` returns their outputs."""
        options, parsed = (
            TokenizationOptions.from_kwargs(tokenization_kwargs),
            parse_prompts(prompts),
        )
        requests = self._submit(
            parsed, sampling_params, priority, options, lora_request=lora_request
        )
        self._enqueued.extend(requests)
        return [request.request_id for request in requests]

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        lora_request: Any = None,
        **template_options: Any,
    ) -> list[str]:
        options = TokenizationOptions(add_special_tokens=False)
        prompts = self._session.inputs.render_chats(messages, **template_options)
        requests = self._submit(prompts, sampling_params, None, options, lora_request=lora_request)
        self._enqueued.extend(requests)
        return [request.request_id for request in requests]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Outputs of everything enqueued, by any thread, in order."""
        requests, self._enqueued = self._enqueued, []
        with no_full_collections():
            return self._finish(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, sharing their common blocks."""
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit must be at least 1, got {concurrency_limit}.")
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}.")
        parsed, options = parse_prompts(prompts), TokenizationOptions()
        self._inputs.encode_texts(parsed, options)
        sampling = [params.sampling()] * len(parsed)
        adapters = self._loaded_adapters(lora_request, len(parsed))
        new_requests = self._all_checked(
            self._checked_requests(parsed, sampling, None, options, adapters, beams=params)
        )
        size = concurrency_limit or max(len(new_requests), 1)
        outputs: list[BeamSearchOutput] = []
        with ProgressBar(len(new_requests), use_tqdm) as bar:
            for start in range(0, len(new_requests), size):
                part = slice(start, start + size)
                requests = self._add(new_requests[part], parsed[part])
                self._wait(requests, bar)
                self._loop.raise_failure(requests)
                outputs += [request.read_beams(self._inputs.tokenizer) for request in requests]
        return outputs

    def embed(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, from the model's last hidden states."""
        params = checked_params(pooling_params, self.model_config.hidden_size)
        parsed = parse_prompts(prompts)
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        self._inputs.encode_texts(parsed, options)
        sampling = [params.sampling()] * len(parsed)
        adapters = self._loaded_adapters(lora_request, len(parsed))
        new_requests = self._all_checked(
            self._checked_requests(
                parsed, sampling, priority, options, adapters, pooling=params.pooling
            )
        )
        with ProgressBar(len(new_requests), use_tqdm) as bar:
            requests = self._add(new_requests, parsed)
            self._wait(requests, bar)
        return [request.read_embedding(params, self._core.death) for request in requests]

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine by itself: requests are added, and steps made, one by one."""
        if self._llm_engine is None:
            self._llm_engine = LLMEngine(self, self._loop, self._submit)
        return self._llm_engine

    # --- asking -----------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no parameters are given."""
        return self._session.default_params.clone()

    def get_default_chat_params(self) -> SamplingParams:
        """The same for conversations, as the server and `quire chat` use them: without a limit of
        tokens, unless the model has one."""
        return self._session.chat_params.clone()

    def get_metrics(self) -> list[Metric]:
        with self._loop.engine() as core:
            return core.read_metrics().all

    def statistics(self) -> EngineStatistics:
        """A short summary of the engine's life so far."""
        with self._loop.engine() as core:
            return core.statistics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        with self._loop.engine() as core:
            core.reset_prefix_cache()
        return True

    # --- adapters ---------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into the memory of the host before it is asked for; raises if it cannot
        be used."""
        with self._loop.engine() as core:
            loading = core.load_adapter(
                lora_request.lora_name,
                lora_request.lora_int_id,
                lora_request.lora_path,
                lora_request.load_inplace,
            )
        while not loading.done():
            self._loop.step()
            self._loop.rest()
        loading.result()
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget what was loaded under a number, by whatever names; requests that use it go on.
        Whether there was something."""
        with self._loop.engine() as core:
            return core.unload_adapter(lora_id)

    def list_loras(self) -> set[int]:
        """`lora_int_id`s of the adapters in the memory of the host."""
        with self._loop.engine() as core:
            return set(core.list_adapters())

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter on the device, unless another could not run otherwise."""
        with self._loop.engine() as core:
            return core.pin_adapter(lora_id)

    # --- ending -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free weights and KV cache. The object cannot be used afterwards; calls that other
        threads wait in end with `EngineDeadError`."""
        self._loop.shutdown()
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    encode = _refused("encode", "pooling models are not served")
    classify = _refused("classify", "pooling models are not served")
    score = _refused("score", "pooling models are not served")
    reward = _refused("reward", "pooling models are not served")
    sleep = _refused("sleep", "memory cannot be released while the engine lives; use shutdown()")
    wake_up = _refused("wake_up", "the engine never sleeps")
    collective_rpc = _refused("collective_rpc", "there is one worker, in this process")
    apply_model = _refused("apply_model", "the model is not exposed")
    start_profile = _refused("start_profile", "use a profiler on this process")
    stop_profile = _refused("stop_profile", "use a profiler on this process")

    # --- inside -----------------------------------------------------------------------------------

    def _submit(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        priority: Sequence[int] | None,
        options: TokenizationOptions,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        lora_request: Any = None,
    ) -> list[OpenRequest]:
        """Hand all requests to the engine; none if one is bad. With several steps in flight the
        first are computed while those after them are checked."""
        params = params_per_prompt(sampling_params, len(prompts), self._session.default_params)
        self._inputs.encode_texts(prompts, options)
        streams = kind is not RequestOutputKind.FINAL_ONLY
        adapters = self._loaded_adapters(lora_request, len(prompts))
        new_requests = self._checked_requests(
            prompts, params, priority, options, adapters, streams=streams
        )
        has_grammars = any(one.structured_outputs is not None for one in params)
        if priority is None and self._core.can_start_ahead and not has_grammars:
            return self._add(new_requests, prompts, kind, starts=True)
        checked = self._all_checked(new_requests)
        compilations = self._compiled(checked) if has_grammars else None
        return self._add(checked, prompts, kind, compilations, starts=priority is None)

    def _checked_requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        options: TokenizationOptions,
        adapters: Sequence[LoRARequest | None],
        *,
        streams: bool = False,
        pooling: str | None = None,
        beams: BeamSearchParams | None = None,
    ) -> Iterator[NewRequest]:
        """One for each prompt, whose text is tokenised already; raises at the first that is bad."""
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(
                f"priority has {len(priority)} entries for {len(prompts)} prompts; give one each."
            )
        inputs, now, terms = self._inputs, self._core.clock(), RequestTerms()
        prepared: dict[int, SamplingParams] = {}
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with naming_index(i):
                inputs.check_prompt(prompt, options)
                if id(one) not in prepared:
                    prepared[id(one)] = inputs.prepare_params(one)
                new = inputs.new_request(
                    prompt,
                    prepared[id(one)],
                    terms if priority is None else RequestTerms(priority[i]),
                    arrival_time=now,
                    streams=streams,
                    pooling=pooling,
                    beams=beams,
                    adapter=adapters[i],
                )
                self._core.check(new)
            yield new

    def _loaded_adapters(self, lora_request: Any, count: int) -> list[LoRARequest | None]:
        """The adapter of each of `count` prompts. Raises if one cannot be used: as many as the host
        has room for are loaded here, and the others are loaded when it is their turn."""
        adapters = adapters_per_prompt(lora_request, count)
        wanted: dict[tuple[str, str], tuple[int, LoRARequest]] = {}
        for index, one in enumerate(adapters):
            if one is not None:
                wanted.setdefault((one.lora_name, one.lora_path), (index, one))
        limits = self.options.adapters.limits if wanted else None
        if limits is None:
            return adapters
        most = limits.max_host_adapters or limits.num_chunks
        loaded = dict(islice(wanted.items(), most))
        for index, adapter in loaded.values():
            with naming_index(index):
                self.add_lora(adapter)
        # What was read again just now is not read again for each of its prompts.
        return [
            one.read_once() if one and (one.lora_name, one.lora_path) in loaded else one
            for one in adapters
        ]

    def _compiled(self, new_requests: Sequence[NewRequest]) -> list[Compilation | None]:
        """The grammars of requests, ready; raises if one cannot be enforced. They are kept here, as
        the compiler forgets the oldest, and takes no more at once than it keeps."""
        made: list[Compilation | None] = []

        def wait_for(index: int) -> None:
            compilation = made[index]
            if compilation is not None:
                with naming_index(index):
                    compilation.result()

        try:
            for i, new in enumerate(new_requests):
                if i >= COMPILED_AHEAD:
                    wait_for(i - COMPILED_AHEAD)
                with naming_index(i):
                    made.append(self._core.compile_grammar(new))
            for i in range(max(len(made) - COMPILED_AHEAD, 0), len(made)):
                wait_for(i)
        except BaseException:  # also Ctrl-C: the others are not wanted any more
            for compilation in made:
                if compilation is not None:
                    compilation.cancel()
            raise
        return made

    def _all_checked(self, new_requests: Iterator[NewRequest]) -> list[NewRequest]:
        """All of them, while no thread steps the engine."""
        made = list[NewRequest]()
        more = True
        while more:
            with self._loop.engine():
                group = list(islice(new_requests, TAKEN_AT_ONCE))
            made += group
            more = len(group) == TAKEN_AT_ONCE
        return made

    def _add(
        self,
        new_requests: Iterable[NewRequest],
        prompts: Sequence[Prompt],
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        compilations: Sequence[Compilation | None] | None = None,
        starts: bool = False,
    ) -> list[OpenRequest]:
        """All of them or none. Where the engine is free, steps are begun once that `starts`."""
        triples = zip(new_requests, compilations or [None] * len(prompts), prompts, strict=True)
        requests: list[OpenRequest] = []
        num_tokens = 0
        more = True
        try:
            while more:
                with self._loop.engine() as core:
                    before = len(requests)
                    for new, compilation, prompt in islice(triples, TAKEN_AT_ONCE):
                        core.add(new, compilation)
                        requests.append(self._loop.open(new, prompt.text, kind))
                        num_tokens += len(new.prompt_token_ids)
                        if starts and num_tokens >= TOKENS_TO_START_WITH and core.can_start_ahead:
                            self._loop.step_held()
                    more = len(requests) - before == TAKEN_AT_ONCE
        except BaseException:
            self._loop.forget(requests)
            raise
        return requests

    def _wait(self, requests: Sequence[OpenRequest], bar: ProgressBar) -> None:
        """Until the given requests have ended; they are gone afterwards, ended or not."""
        try:
            call = self._loop.follow(requests)
            num_left = len(requests)
            while num_left:
                for request in self._loop.next_changes(call):
                    num_left -= 1
                    bar.add(request)
        finally:
            self._loop.forget(requests)

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        priority: Sequence[int] | None,
        options: TokenizationOptions,
        use_tqdm: bool,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        with no_full_collections():
            requests = self._submit(
                prompts, sampling_params, priority, options, lora_request=lora_request
            )
            return self._finish(requests, use_tqdm)

    def _finish(self, requests: list[OpenRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Step until the given requests have ended."""
        with ProgressBar(len(requests), use_tqdm) as bar:
            self._wait(requests, bar)
        self._loop.raise_if_dead(requests)
        return [request.read() for request in requests]

    def _stream(
        self,
        prompts: list[Prompt],
        params: SamplingParams | None,
        options: TokenizationOptions,
        lora_request: LoRARequest | None,
    ) -> Iterator[RequestOutput]:
        if len(prompts) != 1:
            raise RequestError(f"stream takes one prompt, got {len(prompts)}.")
        kind = RequestOutputKind.DELTA if params is None else params.output_kind
        requests = self._submit(prompts, params, None, options, kind, lora_request)

        def outputs() -> Iterator[RequestOutput]:
            try:
                call = self._loop.follow(requests)
                done = False
                while not done:
                    self._loop.next_changes(call)
                    self._loop.raise_failure(requests)
                    output = self._loop.read(requests[0])
                    if output is not None:
                        done = output.finished
                        yield output
            finally:
                self._loop.forget(requests)

        return outputs()


class LLMEngine:
    """The engine of an `LLM` with vLLM's methods: requests are added, and steps made, one by one.
    Both may be used at the same time."""

    def __init__(self, llm: LLM, loop: StepLoop, submit: Callable[..., list[OpenRequest]]) -> None:
        self._llm = llm
        self._submit = submit
        self._loop = loop
        self._call = loop.follow(())
        self._open: dict[str, OpenRequest] = {}
        """By the names that callers gave."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> LLMEngine:
        """What else vLLM takes here (usage context, loggers) has no effect."""
        return LLM(**dataclasses.asdict(engine_args)).llm_engine  # type: ignore[call-overload]

    @property
    def model_config(self) -> ModelConfig:
        return self._llm.model_config

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Take one prompt in; `step` returns its outputs, as often as `output_kind` says."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}.")
        if request_id in self._open:
            raise RequestError(f"request_id {request_id!r} is already in use.")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, got {params!r}; LLM.embed takes PoolingParams."
            )
        prompts = parse_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"add_request takes one prompt, got {len(prompts)}.")
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        kind, priorities = params.output_kind, [priority] if priority else None
        (request,) = self._submit(prompts, params, priorities, options, kind, lora_request)
        request.request_id = request_id
        self._open[request_id] = request
        self._loop.follow((request,), self._call)
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns outputs of requests that it changed."""
        outputs = []
        for request in self._loop.step_for(self._call):
            self._loop.raise_if_dead([request])
            output = self._loop.read(request)
            if output is not None:
                outputs.append(output)
            if request.finished:
                self._forget(request)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests without a further output; unknown ones are ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        for name in names:
            if (request := self._open.get(name)) is not None:
                self._forget(request)

    def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return self._llm.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self._llm.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        return self._llm.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        return self._llm.pin_lora(lora_id)

    def shutdown(self) -> None:
        self._llm.shutdown()

    def _forget(self, request: OpenRequest) -> None:
        self._open.pop(request.request_id, None)
        self._loop.forget((request,), self._call)


def _refuse_extras(**extras: Any) -> None:
    for name, value in extras.items():
        if value is not None:
            raise RequestError(f"{name} is not supported yet, got {value!r}; leave it unset.")
