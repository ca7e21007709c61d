"""Which form a body asks its answer to have, under any of the names there are for that."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from quire.protocol.errors import RequestError
from quire.protocol.structured import JsonSettings, StructuredOutputs, as_structured_outputs

if TYPE_CHECKING:
    from quire.server.preparation.bodies import GenerationBody

logger = logging.getLogger(__name__)

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and the fields of `structured_outputs` that they are now."""

_warned_of: set[str] = set()


def requested_form(body: GenerationBody) -> StructuredOutputs | None:
    forms = {"response_format": _from_response_format(body.output_format())}
    for name, field in GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            _warn_of(name, field)
            forms[name] = StructuredOutputs(**{field: value})
    given = {name: form for name, form in forms.items() if form is not None}
    if not _has_settings_only(body.structured_outputs) or not (given or body.declares_tools):
        own = as_structured_outputs(body.structured_outputs)
        given |= {} if own is None else {"structured_outputs": own}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other; use one of them.")
    form, settings = next(iter(given.values()), None), _settings(body)
    return dataclasses.replace(form, **settings) if form is not None and settings else form


def json_settings(body: GenerationBody) -> JsonSettings:
    """What a body says about JSON, whatever asks for it: a form, or a tool's schema."""
    # They are checked beside a form.
    return StructuredOutputs(json_object=True, **_settings(body)).json_settings


def _settings(body: GenerationBody) -> dict[str, Any]:
    names = [item.name for item in dataclasses.fields(JsonSettings)]
    given = body.structured_outputs or {}
    found = {name: given[name] for name in names if given.get(name) is not None}
    if body.guided_whitespace_pattern is not None:
        found.setdefault("whitespace_pattern", body.guided_whitespace_pattern)
    return found


def _has_settings_only(given: dict[str, Any] | None) -> bool:
    """Whether `structured_outputs` has no form of its own, but speaks of one elsewhere."""
    known = {item.name for item in dataclasses.fields(JsonSettings)}
    has_form = {name for name, value in (given or {}).items() if value is not None} - known
    return bool(given) and not has_form


def form_field(body: GenerationBody) -> str | None:
    """Where a body has its form, if that is not `structured_outputs`."""
    own = None if _has_settings_only(body.structured_outputs) else body.structured_outputs
    has_other = own is not None or any(getattr(body, name) is not None for name in GUIDED)
    has_form = body.output_format().get("type", "text") != "text"
    return body.output_format_field if has_form and not has_other else None


def _from_response_format(form: dict[str, Any]) -> StructuredOutputs | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema":
        wrapper = form.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if schema is None:
            raise RequestError(
                "response_format.json_schema.schema is missing; give the schema there, or use "
                "type 'json_object' for any JSON object."
            )
        return StructuredOutputs(json=schema)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=form)
    raise RequestError(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got "
        f"{kind!r}."
    )


def _warn_of(name: str, field: str) -> None:
    if name not in _warned_of:
        _warned_of.add(name)
        logger.warning("bodies have %s, an old name; use structured_outputs.%s", name, field)
