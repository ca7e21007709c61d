"""Bodies of the OpenAI routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, Strict
from pydantic_core import PydanticCustomError

from quire.protocol.errors import RequestError
from quire.server.preparation.bodies import ConversationBody, GenerationBody, RequestBody
from quire.text.tool_calls.declared import ToolUse, chat_tools


def _prompt_input(value: Any) -> Any:
    """A prompt or several, as they are; token ids are neither truth values nor text with digits. A
    union would try each member on every element, and write down what is wrong with each."""
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    if kinds == {list}:
        kinds = set().union(*(map(type, ids) for ids in value))
        fits = kinds <= {int}
    else:
        fits = kinds in ({str}, {int}, set()) and not isinstance(value, int)
    if not fits:
        raise PydanticCustomError(
            "prompt_input",
            "must be a text, a list of texts, a list of token ids, or a list of such lists",
        )
    return value


PromptInput = Annotated[
    Any,
    PlainValidator(
        _prompt_input, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_progress: bool | None = False


def refuse_stream_options(options: object, stream: bool | None) -> None:
    if options is not None and not stream:
        raise RequestError(
            "stream_options is only allowed with stream=true; set it, or leave stream_options out."
        )


class ChoicesBody(GenerationBody):
    """What completions and chat completions have in common: their replies are lists of choices."""

    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None

    def output_format(self) -> dict[str, Any]:
        return self.response_format or {}

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        refuse_stream_options(self.stream_options, self.stream)

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream and self.usage_options.include_progress)


class CompletionBody(ChoicesBody):
    prepared_fields: ClassVar[frozenset[str]] = ChoicesBody.prepared_fields | {
        "prompt",
        "response_format",
    }

    prompt: PromptInput | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = True

    @property
    def asks_about_prompt(self) -> bool:
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise RequestError(
                f"suffix={self.suffix!r} is not supported: models here continue text and cannot "
                "fill it in. Leave suffix out."
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of={self.best_of} is not supported; use n, or leave it out.")
        if self.prompt is None:
            raise RequestError("prompt is missing; give text, token ids, or a list of these.")


class ChatBody(ChoicesBody, ConversationBody):
    prepared_fields: ClassVar[frozenset[str]] = ConversationBody.prepared_fields | {
        *("messages", "documents", "tools", "tool_choice", "response_format"),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = True

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs) or self.logprob_token_ids is not None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for; given ids take their place."""
        needs_number = self.wants_logprobs and self.logprob_token_ids is None
        return self.top_logprobs or 0 if needs_number else self.top_logprobs

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse.read(chat_tools(self.tools), self.tool_choice, self.parallel_tool_calls)

    def chat_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def own_params(self) -> dict[str, Any]:
        return {"logprobs": self.num_logprobs}

    def template_settings(self) -> dict[str, Any]:
        kwargs = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        continues, generates = bool(self.continue_final_message), self.add_generation_prompt
        return {
            "template_kwargs": {name: value for name, value in kwargs.items() if value is not None},
            "add_generation_prompt": not continues if generates is None else generates,
            "continue_final_message": continues,
        }

    def kept_for_reply(self) -> dict[str, Any]:
        """With the role of the last message, which a reply that continues it has too."""
        return {**super().kept_for_reply(), "messages": [{"role": self.messages[-1]["role"]}]}

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} has no effect without logprobs; set "
                "logprobs=true."
            )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}.")


class EmbeddingBody(RequestBody):
    prepared_fields: ClassVar[frozenset[str]] = frozenset({"input"})
    stubs: ClassVar[dict[str, Any]] = {"input": ""}

    input: PromptInput
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Strict()] | None = None
    pooling: str | None = None
    normalize: Annotated[bool, Strict()] | None = None
    add_special_tokens: Annotated[bool, Strict()] | None = True
    user: str | None = None
