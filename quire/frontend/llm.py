"""`LLM`: the offline Python API. Prompts in, finished texts out, in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.engine.grammar.compiler import Compilation
from quire.frontend.beam_outputs import beam_output
from quire.frontend.collector import OpenRequest
from quire.frontend.embedding import embed
from quire.frontend.garbage import no_full_collections
from quire.frontend.inputs import (
    Params,
    Prompt,
    TokenizationOptions,
    naming_index,
    params_per_prompt,
    parse_prompts,
)
from quire.frontend.interrupts import deferred_interrupts
from quire.frontend.outputs import BeamSearchOutput, RequestOutput
from quire.frontend.progress import ProgressBar
from quire.frontend.requests import checked_requests, compiled
from quire.frontend.session import request_failure, start_session
from quire.frontend.tokenizer import Tokenizer
from quire.metrics.engine import EngineStatistics
from quire.metrics.instruments import Metric
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.output import FinishedSequence, StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

TOKENS_TO_START_WITH = 2048
"""Prompt tokens that keep a GPU busy while further requests are taken in."""


def _refused(name: str, reason: str) -> Any:
    def method(self: LLM, *args: Any, **kwargs: Any) -> Any:
        raise QuireError(f"LLM.{name} is not supported yet: {reason}.")

    method.__name__ = name
    method.__doc__ = f"Not supported yet: {reason}."
    return method


class LLM:
    """A model ready to generate. Arguments are vLLM's; without a model the embedded one is used."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self._session, self._core = start_session({"model": model, **arguments})
        self._inputs = self._session.inputs
        self._collector = self._session.collector
        self.options = self._session.options
        self.model_config = self._session.model_config
        self._enqueued: list[OpenRequest] = []

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
        `{"prompt_token_ids": ...}`, one or many. Outputs come in the order of the prompts."""
        _refuse_extras(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        with no_full_collections():
            requests = self._submit(parse_prompts(prompts), sampling_params, priority, options)
            return self._finish(requests, use_tqdm)

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
        _refuse_extras(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._session.render(
            messages,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        options = TokenizationOptions.from_kwargs(tokenization_kwargs, add_special_tokens=False)
        with no_full_collections():
            requests = self._submit(prompts, sampling_params, priority, options)
            return self._finish(requests, use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding new text as it comes (or as `output_kind` says)."""
        options = TokenizationOptions()
        return self._stream(parse_prompts(prompt), sampling_params, options)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding new text as it comes."""
        options = TokenizationOptions(add_special_tokens=False)
        prompts = self._session.render(messages, **template_options)
        return self._stream(prompts, sampling_params, options)

    def enqueue(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Take prompts in without waiting; `wait_for_completion` returns their outputs."""
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        requests = self._submit(parse_prompts(prompts), sampling_params, priority, options)
        self._enqueued.extend(requests)
        return [request.request_id for request in requests]

    def enqueue_chat(
        self, messages: Any, sampling_params: Params = None, **template_options: Any
    ) -> list[str]:
        options = TokenizationOptions(add_special_tokens=False)
        prompts = self._session.render(messages, **template_options)
        requests = self._submit(prompts, sampling_params, None, options)
        self._enqueued.extend(requests)
        return [request.request_id for request in requests]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Outputs of everything enqueued, in order."""
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
        _refuse_extras(lora_request=lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit must be at least 1, got {concurrency_limit}.")
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}.")
        parsed = parse_prompts(prompts)
        self._inputs.tokenize(parsed, TokenizationOptions())
        news = []
        for i, prompt in enumerate(parsed):
            with naming_index(i):
                key, now = self._session.take_keys(1), self._core.clock()
                new = self._inputs.new_request(
                    key, str(key), prompt, params.sampling(), arrival_time=now, beams=params
                )
                self._core.check(new)
            news.append(new)
        size = concurrency_limit or max(len(news), 1)
        outputs: list[BeamSearchOutput] = []
        with ProgressBar(len(news), use_tqdm) as bar:
            for start in range(0, len(news), size):
                outputs.extend(self._search_beams(news[start : start + size], bar))
        return outputs

    # --- asking -----------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no parameters are given."""
        return self._session.default_params.clone()

    def get_metrics(self) -> list[Metric]:
        return self._core.read_metrics()

    def statistics(self) -> EngineStatistics:
        """A short summary of the engine's life so far."""
        return self._core.statistics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self._core.scheduler.reset_prefix_cache()
        return True

    # --- ending -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free weights and KV cache. The object cannot be used afterwards."""
        self._core.shutdown()
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    encode = _refused("encode", "pooling models are not served")
    embed = embed
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
    ) -> list[OpenRequest]:
        """Hand all requests to the engine; none if one is bad. With several steps in flight the
        first are computed while those after them are checked."""
        params = params_per_prompt(sampling_params, len(prompts), self._session.default_params)
        self._inputs.encode_texts(prompts, options)
        streams = kind is not RequestOutputKind.FINAL_ONLY
        news: Iterable[NewRequest] = checked_requests(
            self._session, self._core, prompts, params, priority, options, streams=streams
        )
        forms: list[Compilation | None] = [None] * len(prompts)
        if any(one.structured_outputs is not None for one in params):
            news = list(news)
            forms = compiled(self._core, news)
        elif priority is not None or not self._core.can_start_ahead:
            news = list(news)
        requests: list[OpenRequest] = []
        num_tokens = 0
        try:
            for new, form, prompt in zip(news, forms, prompts, strict=True):
                with deferred_interrupts():
                    self._core.add(new, form)
                    requests.append(self._collector.open(new, prompt.text, kind))
                num_tokens += len(new.prompt_token_ids)
                starts = num_tokens >= TOKENS_TO_START_WITH and priority is None
                if starts and self._core.can_start_ahead:
                    self._step()
        except BaseException:
            self._forget(requests)
            raise
        return requests

    def _finish(self, requests: list[OpenRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Step until the given requests have ended."""
        left = {id(request) for request in requests if not request.finished}
        try:
            with ProgressBar(len(requests), use_tqdm) as bar:
                for request in requests:
                    if request.finished:
                        bar.add(request)
                while left:
                    for request in self._step():
                        if request.finished and id(request) in left:
                            left.remove(id(request))
                            bar.add(request)
        finally:
            self._forget(requests)
        # Where the engine lives on, one request's failure must not cost the others their outputs:
        # its own says finish_reason="error".
        if self._core.death is not None:
            for request in requests:
                if request.error is not None:
                    raise request_failure(request.error, self._core.death)
        return [request.read() for request in requests]

    def _stream(
        self, prompts: list[Prompt], params: SamplingParams | None, options: TokenizationOptions
    ) -> Iterator[RequestOutput]:
        if len(prompts) != 1:
            raise RequestError(f"stream takes one prompt, got {len(prompts)}.")
        kind = RequestOutputKind.DELTA if params is None else params.output_kind
        (request,) = self._submit(prompts, params, None, options, kind)

        def outputs() -> Iterator[RequestOutput]:
            try:
                done = False
                while not done:
                    # Other calls may have taken the request on, or to its end.
                    if not request.has_news:
                        self._step()
                    if request.error is not None:
                        death = self._core.death
                        raise request_failure(request.error, death, request.is_own_fault)
                    if request.has_news:
                        done = request.finished
                        yield request.read()
            finally:
                self._forget([request])

        return outputs()

    def _step(self) -> list[OpenRequest]:
        """One engine step; returns the requests it changed."""
        with deferred_interrupts():
            output = self._core.step()
            started = time.perf_counter()
            changed = self._take_in(output)
            self._core.add_host_time(time.perf_counter() - started)
            return changed

    def _take_in(self, output: StepOutput) -> list[OpenRequest]:
        """Pass a step's output on to open requests; returns those it changed."""
        changed, stopped = self._collector.process(output)
        for sequence in stopped:
            reason = sequence.finish_reason or "stop"
            self._core.abort(sequence.request.engine_id, reason, sequence.key)
        if stopped:
            changed += self._collector.process(self._core.take_ended())[0]
        return changed

    def _forget(self, requests: list[OpenRequest]) -> None:
        """Abort what an exception or a closed iterator left unfinished."""
        for request in requests:
            if not request.finished:
                self._core.abort(request.engine_id)
            self._collector.close(request)

    def _search_beams(self, news: list[NewRequest], bar: ProgressBar) -> Iterator[BeamSearchOutput]:
        ended = self._run_apart(news, bar)
        for new in news:
            if (error := ended[new.key].error) is not None:
                raise request_failure(error, self._core.death)
            yield beam_output(ended[new.key], new, self._inputs.tokenizer)

    def _run_apart(self, news: list[NewRequest], bar: ProgressBar) -> dict[int, FinishedSequence]:
        """Run requests whose outputs are no texts; returns their ends by key."""
        ended: dict[int, FinishedSequence] = {}
        open_ids = {new.key: new.request_id for new in news}
        try:
            for new in news:
                self._core.add(new)
            while open_ids:
                with deferred_interrupts():
                    output = self._core.step()
                    self._take_in(output)
                for sequence in output.finished:
                    if open_ids.pop(sequence.key, None) is not None:
                        ended[sequence.key] = sequence
                        bar.update(1)
        finally:
            for request_id in open_ids.values():
                self._core.abort(request_id)
        return ended


def _refuse_extras(**extras: Any) -> None:
    for name, value in extras.items():
        if value is not None:
            raise RequestError(f"{name} is not supported yet, got {value!r}; leave it unset.")
