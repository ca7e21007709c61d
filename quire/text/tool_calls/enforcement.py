"""Grammars of replies: valid calls in the format that the model was trained on, or answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.config.reply_formats import CHANNELS, HARMONY, ToolFormat
from quire.protocol.structured import JsonSettings, StructuredOutputs, choice_terminal, subschemas
from quire.text.harmony import ANALYSIS, CHANNEL, END, FINAL, MESSAGE, OPENING, Header
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import Tool, ToolUse

SpecialTokens = Callable[[str], int | None]
"""The id of a marker that is a special token, which a grammar cannot spell out."""
COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")
"""Keywords beside which `additionalProperties: false` would mean something else."""


@dataclass
class ReplyGrammar:
    """A grammar in Lark's notation, made rule by rule."""

    lines: list[str] = field(default_factory=list)
    fields: dict[int, str] = field(default_factory=dict)
    """By the number of a line, from 1: the field of the request that it comes from, for errors."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def add(self, *lines: str) -> None:
        self.lines += lines

    def add_schema(self, rule: str, schema: Any, settings: JsonSettings, name: str) -> None:
        self.lines.append(f"{rule}: %json {json.dumps(settings.embedded(schema))}")
        self.fields[len(self.lines)] = name


def reply_grammar(
    format: MessageFormat,
    use: ToolUse,
    wanted: StructuredOutputs | None,
    special: SpecialTokens,
    settings: JsonSettings,
    answer_field: str = "structured_outputs",
) -> ReplyGrammar | None:
    """What a reply may be: calls where they are required; calls or JSON of the `wanted` schema
    where they are possible; after reasoning if the model reasons. None if `wanted`, as it is, says
    all there is to say. `answer_field` is where the client wrote it."""
    is_json = wanted is not None and wanted.kind in ("json", "json_object")
    has_calls = use.mode == "required" or (use.mode == "auto" and is_json)
    has_answer = use.mode != "required" and _is_part(wanted)
    thinks = format.tags is not None or format.has_channels
    if not has_calls and not (has_answer and thinks):
        return None
    grammar = ReplyGrammar()
    prefix, head = _add_reasoning(grammar, format, special), ""
    if format.has_channels:
        before, head = _add_channels(grammar, format, special, has_answer)
        prefix += before
        has_calls = has_calls and not (has_answer and not head)  # the answer has begun
    parts = ["calls"] * has_calls + [f"{head}answer"] * has_answer
    grammar.add(f"start: {prefix}({' | '.join(parts)})")
    if has_calls:
        _add_calls(grammar, format, use, special, settings, beside_json=has_answer)
    if has_answer:
        assert wanted is not None
        if wanted.choice is not None:
            grammar.add("answer: CHOICE", choice_terminal("CHOICE", wanted).rstrip("\n"))
        else:
            grammar.add_schema("answer", json.loads(wanted.text), settings, answer_field)
    return grammar


def _is_part(wanted: StructuredOutputs | None) -> bool:
    """Whether it describes the answer alone. Grammars and regular expressions describe the whole
    text: they can contain the tags of reasoning themselves."""
    return wanted is not None and wanted.kind in ("json", "json_object", "choice")


def _add_calls(
    grammar: ReplyGrammar,
    format: MessageFormat,
    use: ToolUse,
    special: SpecialTokens,
    settings: JsonSettings,
    beside_json: bool,
) -> None:
    """`beside_json`: the text may be other JSON instead."""
    assert format.tool_format is not None
    style = format.tool_format
    allowed = set(use.allowed)
    tools = [tool for tool in use.tools if tool.name in allowed]

    def literal(text: str) -> str:
        return _literal(text, style.markers, special)

    between = "" if use.max_calls == 1 else f" ({literal(style.between)} call)*"
    words = [literal(style.before), f"call{between}", literal(style.after)]
    grammar.add(f"calls: {' '.join(filter(None, words))}")
    grammar.add(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    for i, tool in enumerate(tools):
        if style.is_bare and beside_json:
            # The lexer reads '{"name": ' as one word where it is spelled out, and would not go
            # back when another key follows.
            grammar.add_schema(f"call_{i}", _call_schema(tool, style), settings, tool.field)
            continue
        name = json.dumps(tool.name) if style.quotes_names else tool.name
        head = literal(f"{style.call_start}{name}{style.call_middle}")
        grammar.add(f"call_{i}: {head} arguments_{i} {literal(style.call_end)}")
        grammar.add_schema(f"arguments_{i}", arguments_schema(tool), settings, tool.field)


def _call_schema(tool: Tool, style: ToolFormat) -> dict[str, Any]:
    """A call as one object."""
    key, arguments = style.arguments_key, arguments_schema(tool)
    for part in subschemas(arguments):
        if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
            part["$ref"] = f"#/properties/{key}{part['$ref'][1:]}"
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Of an object. A function takes the arguments it names: others, also of the objects in it, are
    left out unless its schema has them."""
    schema: dict[str, Any] = json.loads(json.dumps(tool.parameters))
    schema["type"] = "object"  # checked when it was read: no schema excludes it
    if not any(key in schema for key in COMBINED):
        schema.setdefault("additionalProperties", False)
    parts = list(subschemas(schema))
    # A part of several would exclude what the others have.
    if not any(_is_combination(part) for part in parts):
        for part in parts:
            if part.get("properties") and not any(key in part for key in COMBINED):
                part.setdefault("additionalProperties", False)
    return schema


def _is_combination(part: dict[str, Any]) -> bool:
    return isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1


def _add_reasoning(grammar: ReplyGrammar, format: MessageFormat, special: SpecialTokens) -> str:
    """Rules for what the model thinks first; returns what to put before what must follow."""
    tags = format.tags
    if tags is None or tags == CHANNELS:
        return ""
    grammar.add("ANY: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/")
    end = special(tags.end)
    if end is None:
        grammar.add(f"thoughts[lazy]: ANY {json.dumps(tags.end)}")
    else:
        grammar.add(f"thoughts: ANY <[{end}]>")
    if format.starts_in_reasoning:
        return "thoughts SPACE "
    grammar.add(f"reasoning: {_literal(tags.start, [tags.start], special)} thoughts SPACE")
    return "reasoning? "


def _add_channels(
    grammar: ReplyGrammar, format: MessageFormat, special: SpecialTokens, answers: bool
) -> tuple[str, str]:
    """Rules for messages in which the model thinks first, where replies are messages in channels.
    Returns what to put before what must follow, and the header of an answer: none where the prompt
    has opened it. `answers`: whether the reply may be one."""

    def literal(text: str) -> str:
        return _literal(text, HARMONY.markers, special)

    end, opening = special(END), literal(OPENING)
    grammar.add("TEXT: /(.|\\n)*/")
    if end is None:
        grammar.add(f"rest[lazy]: TEXT {json.dumps(END)}")
    else:
        grammar.add(f"rest: TEXT <[{end}]>")
    grammar.add(f"analysis: {literal(CHANNEL + ANALYSIS + MESSAGE)} rest {opening}")
    head = literal(CHANNEL + FINAL + MESSAGE) + " "
    if format.opened is None:
        return f"{opening} analysis* ", head
    header, mark, _ = format.opened.partition(MESSAGE)
    if not mark:
        return "analysis* ", head
    if answers and (Header.read(header) or Header()).channel != ANALYSIS:
        return "", ""
    return f"rest {opening} analysis* ", head


def _literal(text: str, markers: Sequence[str], special: SpecialTokens) -> str:
    """A text as Lark words, with special tokens by their ids."""
    pattern = "|".join(map(re.escape, markers))
    words = []
    for part in re.split(f"({pattern})", text) if pattern else [text]:
        token = special(part) if part in markers else None
        if part:
            words.append(json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>")
    return " ".join(words)
