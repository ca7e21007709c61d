"""From `StructuredOutputs` to the grammar text that llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from quire.config.structured import GrammarSettings
from quire.protocol.errors import RequestError
from quire.protocol.structured import JsonSettings, StructuredOutputs, choice_terminal, closed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

FREE_TEXT = r"(.|\n)*"


def grammar_text(wanted: StructuredOutputs, settings: GrammarSettings) -> str:
    """A grammar in llguidance's own notation; it is not checked yet."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\n{choice_terminal('CHOICE', wanted)}")
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    of_json = settings.for_json(wanted.json_settings)
    if wanted.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_tags(json.loads(wanted.structural_tag), of_json))
    return _schema(wanted, of_json)


def _schema(wanted: StructuredOutputs, settings: JsonSettings) -> str:
    from llguidance import LLMatcher

    schema = json.loads(wanted.text)
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"structured_outputs.json must be a JSON schema, got {str(schema)[:200]!r}."
        )
    if schema is True:
        schema = {}
    if settings.disable_additional_properties:
        schema = closed(schema)
    # Overrides, not defaults: a schema's own "x-guidance" must not turn keywords off.
    overrides: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    overrides.update(settings.guidance())  # type: ignore[typeddict-item]
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _as_lark(grammar: str) -> str:
    if re.search(r"^[ \t]*[\w-]+[ \t]*::=", grammar, re.MULTILINE) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # its own kinds, and those of broken text
        raise RequestError(
            f"structured_outputs.grammar looks like GBNF but cannot be read: {error}."
        ) from None


def _tags(tag: Any, settings: JsonSettings) -> str:
    """Free text with tagged parts. Both of vLLM's notations are read: `structures` and `triggers`,
    and `format` of type "triggered_tags"."""
    parts, triggers = _tag_parts(tag)
    texts = [text for begin, _, end in parts for text in (begin, end)] + triggers
    if not parts or not triggers or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            "structured_outputs.structural_tag must have structures and triggers, or a format of "
            f"type 'triggered_tags' with tags and triggers, got {str(tag)[:200]!r}."
        )
    lines = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(parts)))})* tag_end",
        "tag_end: TAG_TEXT",
        f"TAG_TEXT: /{FREE_TEXT}/",
    ]
    for i, (begin, schema, end) in enumerate(parts):
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(
                f"structured_outputs.structural_tag: no trigger begins {begin!r}; got {triggers!r}."
            )
        words = [json.dumps(begin[len(trigger) :])] if begin != trigger else []
        words += [
            f"%json {json.dumps(settings.embedded(schema))}",
            *([json.dumps(end)] if end else []),
        ]
        lines.append(f"tag_{i}_trigger[lazy]: TAG_TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{i}: tag_{i}_trigger {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _tag_parts(tag: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    try:
        if "structures" in tag:
            parts = [(one["begin"], one["schema"], one["end"]) for one in tag["structures"]]
            return parts, list(tag["triggers"])
        layout = tag["format"]
        parts = [
            (one["begin"], one["content"]["json_schema"], one["end"]) for one in layout["tags"]
        ]
        return parts, list(layout["triggers"])
    except (TypeError, KeyError):
        return [], []
