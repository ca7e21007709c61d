"""What bodies of all protocols have in common. Values are checked where they are used, so that HTTP
and Python say the same about them; here only their types are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, create_model
from pydantic_core import PydanticCustomError

from quire.frontend.inputs import RequestTerms
from quire.protocol.errors import RequestError
from quire.protocol.sampling import (
    PARAMETERS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.protocol.structured import JsonSettings, StructuredOutputs, as_structured_outputs
from quire.server.http.auth import Tenant
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import ToolUse

logger = logging.getLogger(__name__)

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and the fields of `structured_outputs` that they are now."""
JSON_SETTINGS = tuple(item.name for item in dataclasses.fields(JsonSettings))

MAX_EXTRA_BYTES = 64 << 10
NOTED_FIELDS = 20
"""Of one body."""
_unknown_fields: set[str] = set()
_warned_of: set[str] = set()


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


class RequestBody(BaseModel):
    """What every request to the engine can say."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")

    prepared_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are read before the engine is asked, and by no reply."""
    stubs: ClassVar[dict[str, Any]] = {}
    """What stands for those of them that a body must have."""

    def kept_for_reply(self) -> dict[str, Any]:
        """The fields that those who write replies read, as JSON data."""
        hidden = {*self.prepared_fields, *(self.model_extra or ())}
        return self.model_dump(mode="json", exclude=hidden, exclude_unset=True)

    @classmethod
    def from_kept(cls, values: dict[str, Any]) -> Self:
        return cls.model_validate({**cls.stubs, **values})

    def refuse_unsupported(self) -> None:
        """Raise for what the body asks and cannot get, as far as that is known from it alone."""

    def note_unknown_fields(self) -> None:
        """Unknown fields are ignored, which the log says once for each."""
        for name in itertools.islice(self.model_extra or (), NOTED_FIELDS):
            if name not in _unknown_fields and len(_unknown_fields) < 1000:
                _unknown_fields.add(name)
                logger.warning("bodies have a field %.100r, which is unknown and ignored", name)

    def terms(self, tenant: Tenant, wants_progress: bool = False) -> RequestTerms:
        return RequestTerms(
            priority=self.priority or 0,
            tenant=tenant.name,
            shares_prefixes=tenant.shares_prefixes,
            timeout_s=self.timeout_s,
            # Which would tell how much of the prompt others had computed.
            wants_progress=wants_progress and not tenant.shares_prefixes,
        )

    def tokenization(self, add_special_tokens: bool | None) -> dict[str, Any]:
        return {
            "add_special_tokens": add_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }


def _sampling_fields() -> dict[str, Any]:
    """Of bodies: None stands for the default of the server."""
    detection: dict[str, Any] = {
        item.name: (int, ... if item.default is dataclasses.MISSING else item.default)
        for item in dataclasses.fields(RepetitionDetectionParams)
    }
    repetition_detection = create_model("RepetitionDetection", **detection)
    types = {**get_type_hints(SamplingParams), "repetition_detection": repetition_detection}
    return {
        name: ((info.body_type or types[name]) | None, None)
        for name, info in PARAMETERS.items()
        if not info.not_in_bodies
    }


SamplingBody: Any = create_model("SamplingBody", __base__=RequestBody, **_sampling_fields())
"""What `SamplingParams` declares for bodies."""


class GenerationBody(SamplingBody):
    """What every request for text can say."""

    prepared_fields: ClassVar[frozenset[str]] = frozenset(
        {
            *("stop", "stop_token_ids", "logit_bias", "allowed_token_ids"),
            *("bad_words", "repetition_detection", "structured_outputs", "vllm_xargs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        }
    )

    stream: bool | None = False
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    def output_format(self) -> dict[str, Any]:
        """The format of the answer as chat completions' `response_format` has it."""
        return {}

    @property
    def declares_tools(self) -> bool:
        return bool(getattr(self, "tools", None))

    @property
    def output_format_field(self) -> str:
        """Where this protocol's clients write it."""
        return "response_format"

    @property
    def output_kind(self) -> RequestOutputKind:
        return RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY

    @property
    def json_settings(self) -> JsonSettings:
        """What the body says about JSON, whatever asks for it: a format, or a tool's schema."""
        # They are checked beside a format.
        return StructuredOutputs(json_object=True, **self._json_settings()).json_settings

    @property
    def structured_field(self) -> str | None:
        """Where the body has the structure of its answer, if that is not `structured_outputs`."""
        own = None if self._has_settings_only else self.structured_outputs
        has_other = own is not None or any(getattr(self, name) is not None for name in GUIDED)
        has_structure = self.output_format().get("type", "text") != "text"
        return self.output_format_field if has_structure and not has_other else None

    def requested_structure(self) -> StructuredOutputs | None:
        """The structure of the answer, under any of the names there are for that."""
        structures = {"response_format": _from_response_format(self.output_format())}
        for name, field in GUIDED.items():
            value = getattr(self, name)
            if value is not None:
                _warn_of(name, field)
                structures[name] = StructuredOutputs(**{field: value})
        given = {name: structure for name, structure in structures.items() if structure is not None}
        if not self._has_settings_only or not (given or self.declares_tools):
            own = as_structured_outputs(self.structured_outputs)
            given |= {} if own is None else {"structured_outputs": own}
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)} exclude each other; use one of them.")
        structure, settings = next(iter(given.values()), None), self._json_settings()
        return (
            dataclasses.replace(structure, **settings)
            if structure is not None and settings
            else structure
        )

    def _json_settings(self) -> dict[str, Any]:
        given = self.structured_outputs or {}
        found = {name: given[name] for name in JSON_SETTINGS if given.get(name) is not None}
        if self.guided_whitespace_pattern is not None:
            found.setdefault("whitespace_pattern", self.guided_whitespace_pattern)
        return found

    @property
    def _has_settings_only(self) -> bool:
        """Whether `structured_outputs` has no structure of its own, but speaks of one elsewhere."""
        given = self.structured_outputs or {}
        has_structure = {name for name, value in given.items() if value is not None}
        return bool(given) and has_structure <= set(JSON_SETTINGS)

    def without_default_repetition(self) -> dict[str, Any]:
        """What a grammar asks for comes again and again, such as quotes: defaults of the model that
        penalise repetition, or end the text at it, would spoil it."""
        off = {"repetition_penalty": 1.0, "repetition_detection": None}
        return {name: value for name, value in off.items() if getattr(self, name) is None}

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """The parameters of this body; `own` are those that differ between protocols."""
        given = {
            name: getattr(self, name)
            for name, info in PARAMETERS.items()
            if not info.not_in_bodies and getattr(self, name) is not None
        }
        for name, value in given.items():
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise RequestError(f"{name} must fit in 64 bits, got {value}; use a smaller one.")
        if self.repetition_detection is not None:
            values = self.repetition_detection.model_dump()
            given["repetition_detection"] = RepetitionDetectionParams(**values)
        elif "repetition_detection" in self.model_fields_set or self.ignore_eos or self.min_tokens:
            given["repetition_detection"] = None  # the client decides when the text ends
        given["structured_outputs"] = self.requested_structure()
        if given["structured_outputs"] is not None:
            given |= self.without_default_repetition()
        if self.vllm_xargs is not None:
            size = len(json.dumps(self.vllm_xargs))
            if size > MAX_EXTRA_BYTES:
                raise RequestError(
                    f"vllm_xargs has {size} bytes, and at most {MAX_EXTRA_BYTES} are taken; send "
                    "less."
                )
            given["extra_args"] = self.vllm_xargs
        if self.use_beam_search:  # which draws nothing, so that the model's defaults do not apply
            given.pop("temperature", None)
            defaults = SamplingParams()
        return dataclasses.replace(defaults, **{**given, **own})


class ConversationBody(GenerationBody):
    """What every request that goes through the chat template can say."""

    prepared_fields: ClassVar[frozenset[str]] = GenerationBody.prepared_fields | {
        "chat_template",
        "chat_template_kwargs",
    }

    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_field(self) -> str:
        """Where this protocol has the conversation."""
        return "messages"

    @property
    def max_tokens_field(self) -> str:
        """Where it has the limit of the reply."""
        return "max_tokens"

    @property
    def tool_use(self) -> ToolUse:
        raise NotImplementedError

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        raise NotImplementedError

    def template_settings(self) -> dict[str, Any]:
        """What this protocol's fields ask of the chat template, as arguments of `render_chat`."""
        return {}

    def own_params(self) -> dict[str, Any]:
        """Sampling parameters that this protocol has under other names."""
        return {}

    def num_logprobs(self, are_wanted: bool, top_logprobs: int | None) -> int | None:
        """How many of the likeliest tokens are asked for; given ids take their place."""
        needs_number = are_wanted and self.logprob_token_ids is None
        return top_logprobs or 0 if needs_number else top_logprobs

    def check_reply(self, format: MessageFormat, model: str) -> None:
        """Raise for what the body asks of replies that the model's template cannot do."""


class MessageBody(ConversationBody):
    """What every request can say whose reply is one message."""

    tools: list[dict[str, Any]] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.use_beam_search:
            raise RequestError(
                "use_beam_search is not supported here; use /v1/chat/completions, or leave it out."
            )
        if self.n not in (None, 1):
            raise RequestError(f"n={self.n} is not supported here; send several requests.")
        self.refuse("prompt_logprobs", "prompt_logprob_token_ids")

    def refuse(self, *names: str) -> None:
        """Refuse fields whose results replies of this protocol have no place for."""
        for name in names:
            if getattr(self, name) is not None:
                raise RequestError(
                    f"{name} is not supported here: replies have no place for its results. Use "
                    "/v1/chat/completions."
                )


def text_parts(content: Any, kinds: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    """A message's content as the text parts that templates read; `kinds` are the names that the
    protocol has for such parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts, got {content!r:.80}.")
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise RequestError(
                f"{place} is of type {kind!r}, which is not supported; use {' or '.join(kinds)}."
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}.text must be a text, got {part.get('text')!r:.80}.")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _from_response_format(response_format: dict[str, Any]) -> StructuredOutputs | None:
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if schema is None:
            raise RequestError(
                "response_format.json_schema.schema is missing; give the schema there, or use "
                "type 'json_object' for any JSON object."
            )
        return StructuredOutputs(json=schema)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=response_format)
    raise RequestError(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got "
        f"{kind!r}."
    )


def _warn_of(name: str, field: str) -> None:
    if name not in _warned_of:
        _warned_of.add(name)
        logger.warning("bodies have %s, an old name; use structured_outputs.%s", name, field)
