"""Texts in pieces: however a text is cut up, the pieces put together say what the whole says."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.reply_formats import THINK, TOOL_FORMATS
from quire.text.deltas import CallDelta, Delta, Message, TextDelta
from quire.text.message_stream import MessageFormat

NAMES = ("add", "f")
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "```json\n", "```", '{"name": "add", ', '"name"', '"add"', "add"),
    *('"arguments": {', '"parameters": ', '{"a": 1}', '"x\\u00e9"', "tru", "true", "-1.5e", "1"),
    *("{", "}", "[", "]", ":", ",", ";", '"', "\\", "\n", " ", "<", "<t", "Hello", "é"),
    '{"name": "add", "arguments": {"a": "b"}}',
    '<tool_call>\n{"name": "f", "arguments": {"a": [null, {"b": 2}]}}\n</tool_call>',
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
message_formats = st.builds(
    MessageFormat,
    tool_format=st.sampled_from([None, *TOOL_FORMATS.values()]),
    tool_names=st.just(NAMES),
    max_calls=st.sampled_from([None, 1]),
    tags=st.sampled_from([None, THINK]),
    starts_in_reasoning=st.booleans(),
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def streamed(message_format: MessageFormat, pieces: list[str]) -> tuple[Message, list[Delta]]:
    stream, message = message_format.open(), Message()
    deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish()
    for delta in deltas:
        message.add(delta)
    assert stream.has_calls == bool(message.calls)
    return message, deltas


def without_ids(message: Message) -> Any:
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.content, message.reasoning, calls


@given(message_formats, texts, st.lists(st.integers(0, 999), max_size=12))
def test_pieces_say_what_the_whole_says(
    message_format: MessageFormat, text: str, cuts: list[int]
) -> None:
    whole = message_format.parse(text)
    for pieces in (pieces_of(text, cuts), list(text)):
        message, deltas = streamed(message_format, pieces)
        assert without_ids(message) == without_ids(whole)
        begun = [d for d in deltas if isinstance(d, CallDelta) and d.name is not None]
        assert [d.index for d in begun] == list(range(len(whole.calls)))
        assert all(d.id and d.arguments == "" for d in begun)
        assert all(d.arguments for d in deltas if isinstance(d, CallDelta) and d.name is None)


@given(message_formats, texts)
def test_nothing_is_lost(message_format: MessageFormat, text: str) -> None:
    message = message_format.parse(text)
    if not message.calls and not message.reasoning and "think>" not in text:
        shown = (
            message.content
            if not message_format.starts_in_reasoning or message_format.tags is None
            else text
        )
        assert shown == text
    for call in message.calls:
        assert call.name in text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
calls = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), values, max_size=3))
WRITERS: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(calls),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]",
    "json": lambda calls: f"[{', '.join(calls)}]",
}


@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(calls, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["", "Let me see."]),
    st.sampled_from(["", "I <should> think.\n\nHm."]),
    st.lists(st.integers(0, 9999), max_size=12),
)
def test_any_calls_are_found(
    format: str,
    made: list[tuple[str, dict[str, Any]]],
    escapes: bool,
    content: str,
    reasoning: str,
    cuts: list[int],
) -> None:
    """Texts are written with Python's json, and read back."""
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escapes)
        for name, arguments in made
    ]
    text = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text += content + "\n" + WRITERS[format](written)
    message_format = MessageFormat(TOOL_FORMATS[format], NAMES, tags=THINK)
    message, _ = streamed(message_format, pieces_of(text, cuts))
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == made


def test_a_special_token_at_the_end_is_hidden() -> None:
    message_format = MessageFormat(
        TOOL_FORMATS["llama3_json"], NAMES, hidden_ends=("<|eot|>", "<|eom|>")
    )
    stream = message_format.open()
    assert stream.feed("<|eot|> is the end") + stream.finish("<|eot|>") == [
        TextDelta("<|eot|> is the end")
    ]
    assert message_format.parse('{"name": "f", "parameters": {}}<|eom|>').content == ""


@pytest.mark.parametrize(
    ("format", "text", "piece"),
    [
        ("json", "Well." + "\n" * 24_000, 1),
        ("llama3_json", "Well.\n" + " " * 24_000, 1),
        ("json", "```json\n" * 12_000, 96_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 100_000, 100_100),
    ],
)
def test_models_that_are_stuck_cost_little(format: str, text: str, piece: int) -> None:
    """Each of these took 7 s or more where the time grew with the square of the length."""
    stream, started = MessageFormat(TOOL_FORMATS[format], NAMES).open(), time.process_time()
    for at in range(0, len(text), piece):
        stream.feed(text[at : at + piece])
    stream.finish()
    assert time.process_time() - started < 4


@pytest.mark.parametrize("length", [300, 301])
def test_long_names_in_pieces(length: int) -> None:
    message_format = MessageFormat(TOOL_FORMATS["mistral"], NAMES)
    text = f"[TOOL_CALLS]{'a' * length}{{}}"
    message, _ = streamed(message_format, list(text))
    assert without_ids(message) == without_ids(message_format.parse(text))
    assert bool(message.calls) == (length <= 300)
