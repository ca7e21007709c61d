"""Calls as the formats' documentation shows them, and text that only looks like calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.reply_formats import TOOL_FORMATS
from quire.text.deltas import CallDelta, Message, TextDelta
from quire.text.message_stream import MessageFormat

NAMES = ("get_current_temperature", "get_weather", "add")
PARIS = {"location": "Paris, France", "unit": "celsius"}


def parse(format: str, text: str, **settings: Any) -> Message:
    return MessageFormat(TOOL_FORMATS[format], NAMES, **settings).parse(text)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        '<tool_call>\n{"arguments": {"location": "Paris, France", "unit": "celsius"}, "name": '
        '"get_current_temperature"}\n</tool_call>',
        "",
        [("get_current_temperature", PARIS)],
    ),
    (
        "hermes",
        'I look both up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5e3, null]}}\n'
        "</tool_call>",
        "I look both up.",
        [("get_weather", {"city": "Oslo"}), ("add", {"a": 1, "b": [2500.0, None]})],
    ),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", {})]),
    (
        "llama3_json",
        '{"name": "get_current_temperature", "parameters": {"location": "Paris, France", '
        '"unit": "celsius"}}',
        "",
        [("get_current_temperature", PARIS)],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}}; '
        '{"name": "add", "parameters": {"a": "2"}}',
        "",
        [("add", {"a": "1"}), ("add", {"a": "2"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "add", "arguments": {"a": 1}, "id": "VvvODy9mT"}]',
        "",
        [("get_weather", {"city": "Oslo"}), ("add", {"a": 1})],
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]add{"a": 1}',
        "Sure.",
        [("get_weather", {"city": "Oslo"}), ("add", {"a": 1})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1}',
        "",
        [("add", {"a": 1})],
    ),
    (
        "json",
        'First:\n```json\n{"name": "add", "arguments": {"a": 1}}\n```\nThat is all.',
        "First:\nThat is all.",
        [("add", {"a": 1})],
    ),
    (
        "json",
        '[{"name": "add", "parameters": {}}, {"name": "add", "arguments": "{\\"a\\": 2}"}]',
        "",
        [("add", {}), ("add", {"a": 2})],
    ),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CALLS)
def test_calls_as_documented(
    format: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    message = parse(format, text)
    assert calls_of(message) == calls and message.content == content
    assert len({call.id for call in message.calls}) == len(calls)
    for call in message.calls:
        assert len(call.id) == 9 if format == "mistral" else call.id.startswith("call_")


CONTENT = [
    ("hermes", "The tag <tool_call> begins a call, </tool_call> ends it."),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call> '),
    ("hermes", '<tool_call>\n{"name": "add", "argu'),
    ("hermes", "<tool_ca"),
    ("llama3_json", '{"name": "John", "parameters": {}}'),
    ("llama3_json", '{"name": "add"}'),
    ("llama3_json", '{"name": "add", "age": 5, "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", 'You could write {"name": "add", "parameters": {}}.'),
    ("mistral", "[TOOL_CALLS] as such"),
    ("mistral", "[TOOL_CALLS] []"),
    ("json", "```python\nprint({})\n```\n"),
    ("json", "[1, 2]\n[a link](http://example.org)\n{}"),
    ("json", '  {"name": "add", "arguments": 3} '),
]


@pytest.mark.parametrize(("format", "text"), CONTENT)
def test_what_only_looks_like_a_call_is_content(format: str, text: str) -> None:
    assert parse(format, text) == Message(content=text)


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        # Cut off by max_tokens: what is there is passed on.
        ('<tool_call>{"name": "add", "arguments": {"a": [1, 2', '{"a": [1, 2', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_', '{"a": 1}', ""),
        # Line breaks in strings are no JSON, but mean one thing only.
        ('<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>', '{"a": "\\n"}', ""),
        # Too few and too many braces around complete arguments.
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '{"a": 1}', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} and', '{"a": 1}', "and"),
        # The arguments have begun and were passed on: their broken rest follows.
        ('<tool_call>{"name": "add", "arguments": {"a": one}}</tool_call> x', '{"a": one}}', "x"),
    ],
)  # fmt: skip
def test_calls_with_faults(text: str, arguments: str, content: str) -> None:
    message = parse("hermes", text)
    assert [(call.name, call.arguments) for call in message.calls] == [("add", arguments)]
    assert message.content == content


def test_only_one_call_where_no_more_are_allowed() -> None:
    one = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    message = parse("hermes", one % 1 + one % 2, max_calls=1)
    assert calls_of(message) == [("add", {"a": 1})]


def test_arguments_come_as_soon_as_they_are_certain() -> None:
    stream = MessageFormat(TOOL_FORMATS["hermes"], NAMES).open()
    assert stream.feed("Well: <") == [TextDelta("Well:")]
    assert stream.feed('tool_call>{"name": "add"') == []
    first, second = stream.feed(', "arguments": {"a": "x')
    assert isinstance(first, CallDelta) and first.name == "add" and first.arguments == ""
    assert first.index == 0 and first.id
    assert second == CallDelta(0, '{"a": "x')
    assert stream.feed('y"') == [CallDelta(0, 'y"')]
    assert stream.feed("}}</tool_call>") == [CallDelta(0, "}")]
    assert stream.finish() == [] and stream.has_calls


def test_content_is_not_held_back_without_need() -> None:
    stream = MessageFormat(TOOL_FORMATS["json"], NAMES).open()
    for word in ("One", " {two}", ' "three":', " [4]"):
        assert stream.feed(word) == [TextDelta(word)]
