"""`StructuredOutputs`: the grammar that an answer must follow. Checked when made."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_TEXT_BYTES = 1 << 20
"""Longest schema, expression or grammar. What is longer takes more than a second to compile."""

ANY_OBJECT = '{"type":"object"}'
WHITESPACE = r"[ ]{1,2}|[ ]?\n{1,2}[ \t]{0,32}"
"""Between the parts of JSON unless a request or the engine says otherwise: what models write, a
space or a line break and its indentation, but not without end. Some would go on until
`max_tokens`."""


@dataclass(frozen=True)
class JsonSettings:
    """What `StructuredOutputs` says about JSON beside its schema."""

    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @property
    def has_layout(self) -> bool:
        return self.disable_any_whitespace is not None or self.whitespace_pattern is not None

    def guidance(self) -> dict[str, Any]:
        """The layout as llguidance's options."""
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        if self.whitespace_pattern is not None:
            return {"whitespace_pattern": self.whitespace_pattern}
        if self.disable_any_whitespace is None:
            return {"whitespace_pattern": WHITESPACE}
        return {"whitespace_flexible": True}

    def embedded(self, schema: Any) -> Any:
        """A schema as a grammar can hold it, with these settings in it. Its own `x-guidance` could
        turn keywords off, and is dropped."""
        if self.disable_additional_properties:
            schema = closed(schema)
        if schema is True:
            schema = {}
        return {**schema, "x-guidance": self.guidance()} if isinstance(schema, dict) else schema


@dataclass
class StructuredOutputs:
    """What the text of an answer must follow: exactly one of `KINDS`."""

    json: Any = None
    """A JSON schema: text, a dictionary, or a Pydantic model."""
    regex: str | None = None
    """Matches the whole text; the syntax is that of Rust's `regex`."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark's or llama.cpp's (GBNF) notation."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: Any = None
    """Free text in which tags begin parts of a given schema: JSON text or a dictionary."""
    disable_any_whitespace: bool | None = None
    """True: JSON without white space between its parts; False: with any amount of it; None: with a
    space, or a line break and its indentation."""
    disable_additional_properties: bool = False
    """Objects have no keys but those their schema names."""
    whitespace_pattern: str | None = None
    """What may stand between the parts of JSON, as a regular expression."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {found}."
            )
        if self.json is not None:
            self.json = _schema_text(self.json)
        if self.structural_tag is not None:
            self.structural_tag = _json_text("structural_tag", self.structural_tag)
        self._check_choice()
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(
                    f"structured_outputs.{name} must be a string that is not empty, got {value!r}."
                )
        self._check_switches()
        self._check_texts()

    def _check_switches(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise RequestError(
                    f"structured_outputs.{name} must be true or false, got "
                    f"{getattr(self, name)!r:.80}."
                )
        self.disable_additional_properties = bool(self.disable_additional_properties)

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if isinstance(self.choice, str) or not isinstance(self.choice, Sequence):
            raise RequestError(
                f"structured_outputs.choice must be a list of strings, got {self.choice!r}."
            )
        self.choice = list(self.choice)
        if not self.choice or not all(isinstance(one, str) and one for one in self.choice):
            raise RequestError(
                "structured_outputs.choice must be a list of strings that are not empty, got "
                f"{str(self.choice)[:200]}."
            )

    def _check_texts(self) -> None:
        texts = {self.kind: self.text, "whitespace_pattern": self.whitespace_pattern or ""}
        for name, text in texts.items():
            try:
                size = len(text.encode())
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"structured_outputs.{name} has half a character, "
                    f"{text[error.start]!r}, which no text has; leave it out."
                ) from None
            if size > MAX_TEXT_BYTES:
                raise RequestError(
                    f"structured_outputs.{name} has {size} bytes, but at most {MAX_TEXT_BYTES} "
                    "are taken; use a smaller one."
                )

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def json_settings(self) -> JsonSettings:
        return JsonSettings(
            self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern
        )

    @property
    def text(self) -> str:
        """Its value as text, whatever its kind."""
        if self.json_object:
            return ANY_OBJECT
        value = getattr(self, self.kind)
        return json.dumps(value, ensure_ascii=False) if self.choice is not None else str(value)


StructuredOutputsParams = StructuredOutputs


def guided_decoding_params(**fields: Any) -> StructuredOutputs:
    """`GuidedDecodingParams`, vLLM's older name; a choice of backend has no counterpart here."""
    warnings.warn(
        "GuidedDecodingParams is an old name; use StructuredOutputs, whose fields are the same.",
        DeprecationWarning,
        stacklevel=2,
    )
    for name in ("backend", "disable_fallback"):
        fields.pop(name, None)
    return StructuredOutputs(**fields)


def as_structured_outputs(value: Any) -> StructuredOutputs | None:
    """From what `SamplingParams.structured_outputs` may be given as."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if isinstance(value, Mapping):
        known = StructuredOutputs.__dataclass_fields__
        unknown = [name for name in value if name not in known]
        if unknown:
            raise RequestError(
                f"structured_outputs[{unknown[0]!r}] is unknown; use one of {', '.join(known)}."
            )
        return StructuredOutputs(**value)
    raise RequestError(f"structured_outputs must be a StructuredOutputs, got {value!r}.")


def closed(schema: Any) -> Any:
    """`schema` with `additionalProperties: false` in every object that says nothing about it."""
    schema = json.loads(json.dumps(schema))
    for part in subschemas(schema):
        is_object = part.get("type") == "object" or "properties" in part
        if is_object and "additionalProperties" not in part and "patternProperties" not in part:
            part["additionalProperties"] = False
    return schema


def choice_terminal(name: str, wanted: StructuredOutputs) -> str:
    """A choice in Lark's notation. As one terminal, for a parser has a limit on alternatives."""
    texts = (json.dumps(one, ensure_ascii=False) for one in wanted.choice or ())
    return f"{name}: {' | '.join(texts)}\n"


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema. What only looks like one (in `enum`, say) is not visited."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key in ("properties", "$defs", "definitions", "patternProperties"):
            if isinstance(part.get(key), dict):
                pending += part[key].values()
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(part.get(key), list):
                pending += part[key]
        for key in ("items", "additionalProperties"):
            pending += part[key] if isinstance(part.get(key), list) else [part.get(key)]


def _schema_text(value: Any) -> str:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    return _json_text("json", value)


def _json_text(name: str, value: Any) -> str:
    where = f"structured_outputs.{name}"
    try:
        if not isinstance(value, str):
            return json.dumps(value)
        if len(value) <= MAX_TEXT_BYTES:  # longer ones are refused for that
            json.loads(value)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"{where} must be JSON or what can be written as JSON: {error}."
        ) from None
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply; use a flatter one.") from None
    return value
