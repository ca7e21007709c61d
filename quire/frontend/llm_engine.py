"""`LLMEngine`: an engine whose caller adds requests and makes its steps one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.frontend.inputs import TokenizationOptions, parse_prompts
from quire.frontend.output_processor import OpenRequest
from quire.protocol.errors import RequestError
from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.config.engine_args import EngineArgs
    from quire.config.model import ModelConfig
    from quire.frontend.llm import LLM
    from quire.frontend.outputs import RequestOutput
    from quire.text.tokenizer import Tokenizer


class LLMEngine:
    """The engine of an `LLM`, with vLLM's methods. Both may be used at the same time."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop = llm._loop
        self._call = self._loop.follow(())
        self._open: dict[str, OpenRequest] = {}
        """By the names that callers gave."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> LLMEngine:
        """What else vLLM takes here (usage context, loggers) has no effect."""
        from quire.frontend.llm import LLM

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
        if lora_request is not None:
            raise RequestError(f"lora_request is not supported yet, got {lora_request!r}.")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, got {params!r}; LLM.embed takes PoolingParams."
            )
        prompts = parse_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"add_request takes one prompt, got {len(prompts)}.")
        options = TokenizationOptions.from_kwargs(tokenization_kwargs)
        kind, priorities = params.output_kind, [priority] if priority else None
        (request,) = self._llm._submit(prompts, params, priorities, options, kind)
        request.request_id = request_id
        self._open[request_id] = request
        self._loop.follow((request,), self._call)
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns outputs of requests that it changed."""
        outputs = []
        for request in self._loop.step_for(self._call):
            if request.error is not None and self._llm._core.death is not None:
                self._llm._raise_failure([request])
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

    def shutdown(self) -> None:
        self._llm.shutdown()

    def _forget(self, request: OpenRequest) -> None:
        self._open.pop(request.request_id, None)
        self._loop.forget((request,), self._call)
