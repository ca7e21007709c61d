"""Bodies of the OpenAI routes. Values are checked where they are used, so that HTTP and Python
say the same about them; here only their types are."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.frontend.async_llm import RequestTerms
from quire.protocol.errors import RequestError
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams
from quire.server.openai.response_format import requested_form

logger = logging.getLogger(__name__)

# Fields of SamplingParams that a body cannot set under their own name, and why.
NOT_IN_BODIES = {
    "logprobs": "means another thing in each protocol",
    "max_tokens": "has another default in each protocol",
    "output_kind": "follows from `stream`",
    "flat_logprobs": "is a form of Python objects",
    "extra_args": "is called vllm_xargs",
    "bad_words_token_ids": "is made from bad_words",
    "guided_decoding": "is called guided_json, guided_regex and so on",
    "trace_decode_token_ids": "is not supported",
    "routed_experts_prompt_start": "is not supported",
}

_unknown_fields: set[str] = set()


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_progress: bool | None = False


class RepetitionDetection(BaseModel):
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class GenerationBody(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stream_interval: int | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    thinking_token_budget: int | None = None

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    use_beam_search: bool | None = None

    def note_unknown_fields(self) -> None:
        """Fields nobody knows are ignored, which the log says once for each."""
        for name in self.model_extra or ():
            if name not in _unknown_fields and len(_unknown_fields) < 1000:
                _unknown_fields.add(name)
                logger.warning("bodies have a field %.100r, which is unknown and ignored", name)

    def refuse_unsupported(self) -> None:
        if self.use_beam_search:
            raise RequestError("use_beam_search is not supported over HTTP; leave it out.")

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """The parameters of this body; `own` are those that differ between protocols."""
        given = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(SamplingParams)
            if item.name not in NOT_IN_BODIES and getattr(self, item.name) is not None
        }
        if self.repetition_detection is not None:
            values = self.repetition_detection.model_dump()
            given["repetition_detection"] = RepetitionDetectionParams(**values)
        given["structured_outputs"] = requested_form(self)
        if self.vllm_xargs is not None:
            given["extra_args"] = self.vllm_xargs
        return dataclasses.replace(defaults, **given, **own)

    def terms(self, tenant: str) -> RequestTerms:
        return RequestTerms(
            priority=self.priority or 0,
            tenant=tenant,
            timeout_s=self.timeout_s,
            wants_progress=bool(self.stream and self.usage_options.include_progress),
        )

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = True


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_special_tokens: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
