"""Grammars that leave a model nothing but valid calls, in the format it was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.structured import GrammarSettings
from quire.frontend.tools.declared import Tool, ToolUse
from quire.frontend.tools.message_stream import MessageForm
from quire.protocol.structured import StructuredOutputs, choice_terminal, closed, plain

SpecialTokens = Callable[[str], int | None]
"""The id of a marker that is a special token, which a grammar cannot spell out."""
COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")
"""Keywords beside which `additionalProperties: false` would mean something else."""


def calls_grammar(form: MessageForm, use: ToolUse, special: SpecialTokens) -> str:
    """In Lark's notation: reasoning if the model reasons, then one call or more."""
    assert form.format is not None
    style = form.format
    allowed = set(use.allowed)
    tools = [tool for tool in use.tools if tool.name in allowed]

    def literal(text: str) -> str:
        return _literal(text, style.markers, special)

    between = "" if use.max_calls == 1 else f" ({literal(style.between)} call)*"
    words = [literal(style.before), f"call{between}", literal(style.after)]
    lines, prefix = _reasoning(form, special)
    lines.append(f"start: {prefix}{' '.join(filter(None, words))}")
    lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    for i, tool in enumerate(tools):
        name = json.dumps(tool.name) if style.quotes_names else tool.name
        head = literal(f"{style.call_start}{name}{style.call_middle}")
        lines.append(f"call_{i}: {head} arguments_{i} {literal(style.call_end)}")
        lines.append(f"arguments_{i}: %json {json.dumps(_arguments_schema(tool))}")
    return "\n".join(lines) + "\n"


def answer_after_reasoning(
    form: MessageForm,
    wanted: StructuredOutputs,
    special: SpecialTokens,
    settings: GrammarSettings,
) -> StructuredOutputs:
    """The same form for the answer alone, after what the model may think first. Grammars and
    regular expressions speak of the whole text: they can have the tags themselves."""
    if wanted.choice is not None:
        answer = f"CHOICE\n{choice_terminal('CHOICE', wanted)}"
    elif wanted.json is not None or wanted.json_object:
        answer = f"%json {json.dumps(_answer_schema(wanted, settings))}"
    else:
        return wanted
    lines, prefix = _reasoning(form, special)
    lines += [f"start: {prefix}answer", f"answer: {answer}"]
    return StructuredOutputs(grammar="\n".join(lines) + "\n")


def _answer_schema(wanted: StructuredOutputs, settings: GrammarSettings) -> Any:
    """A schema with the request's and the engine's settings, which grammars have no other place
    for."""
    schema = plain(json.loads(wanted.text))
    if wanted.disable_additional_properties or settings.disable_additional_properties:
        schema = closed(schema)
    written: dict[str, Any] = {}
    if wanted.disable_any_whitespace or settings.disable_any_whitespace:
        written["whitespace_flexible"] = False
    elif wanted.whitespace_pattern is not None:
        written["whitespace_pattern"] = wanted.whitespace_pattern
    return {**schema, "x-guidance": written} if written and isinstance(schema, dict) else schema


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """A function takes the arguments it names: others are left out unless its schema has them."""
    schema: dict[str, Any] = plain(tool.parameters)
    if not any(key in schema for key in COMBINED):
        schema.setdefault("type", "object")
        schema.setdefault("additionalProperties", False)
    return schema


def _reasoning(form: MessageForm, special: SpecialTokens) -> tuple[list[str], str]:
    """Rules for what the model thinks first, and what to put before what must follow."""
    tags = form.tags
    if tags is None:
        return [], ""
    lines = ["ANY: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/"]
    end = special(tags.end)
    if end is None:
        lines.append(f"thoughts[lazy]: ANY {json.dumps(tags.end)}")
    else:
        lines.append(f"thoughts: ANY <[{end}]>")
    if form.starts_in_reasoning:
        return lines, "thoughts SPACE "
    lines.append(f"reasoning: {_literal(tags.start, [tags.start], special)} thoughts SPACE")
    return lines, "reasoning? "


def _literal(text: str, markers: Sequence[str], special: SpecialTokens) -> str:
    """A text as Lark words, with special tokens by their ids."""
    pattern = "|".join(map(re.escape, markers))
    words = []
    for part in re.split(f"({pattern})", text) if pattern else [text]:
        token = special(part) if part in markers else None
        if part:
            words.append(json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>")
    return " ".join(words)
