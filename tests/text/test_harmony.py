"""Replies in Harmony's channels: what gpt-oss writes, what it may write by mistake, and any text,
in whatever pieces they come."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.config.reply_formats import CHANNELS, HARMONY
from quire.text.deltas import CallDelta, Delta, Message, ReasoningDelta, TextDelta
from quire.text.harmony import Header, may_become_header, opened_header
from quire.text.message_stream import MessageFormat

NAMES = ("get_weather", "now")
FORMAT = MessageFormat(
    HARMONY,
    NAMES,
    tags=CHANNELS,
    opened="",
    hidden_ends=("<|endoftext|>", *HARMONY.markers),
)
"""Behind a prompt that ends with `<|start|>assistant`."""
THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PARIS = '{"city": "Paris"}'


def said(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.reasoning, message.content, calls


def streamed(message_format: MessageFormat, pieces: list[str]) -> Message:
    stream, message = message_format.open(), Message()
    for delta in [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish():
        assert not isinstance(delta, CallDelta) or bool(delta.arguments) == (delta.name is None)
        message.add(delta)
    assert stream.has_calls == bool(message.calls)
    return message


REPLIES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    (
        "an answer",
        f"{THINKS}<|channel|>final<|message|>Paris.<|return|>",
        "Hm.",
        "Paris.",
        [],
    ),
    (
        "a call",
        f"{THINKS}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{PARIS}<|call|>",
        "Hm.",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "the recipient comes first",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>",
        "",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "a preamble, and calls one after the other",
        f"{THINKS}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
        "<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>",
        "Hm.",
        "I look it up.",
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "messages of one kind",
        f"{THINKS}{THINKS}<|channel|>commentary<|message|>One.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Two.",
        "Hm.\nHm.",
        "One.\nTwo.",
        [],
    ),
    (
        "an answer in JSON",
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>',
        "",
        '{"a": 1}',
        [],
    ),
    ("no channel", "<|message|>Paris.<|return|>", "", "Paris.", []),
    ("no final message", "<|channel|>analysis<|message|>Hm.<|end|>", "Hm.", "", []),
    ("another end", "<|channel|>final<|message|>Paris.<|endoftext|>", "", "Paris.", []),
    # --- cut off ---
    ("in reasoning", "<|channel|>analysis<|message|>Hm, so", "Hm, so", "", []),
    ("in a header", f"{THINKS}<|channel|>fin", "Hm.", "", []),
    ("before a header", f"{THINKS}<|channel|>", "Hm.", "", []),
    ("before a role", "<|channel|>analysis<|message|>Hm.<|end|><|start|>", "Hm.", "", []),
    ("in the first header", "<|channel|>analysis", "", "", []),
    ("in a recipient", " to=functions.get_we", "", "", []),
    (
        "in arguments",
        '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": [1',
        "",
        "",
        [("now", '{"a": [1')],
    ),
    ("before arguments", "<|channel|>commentary to=functions.now json<|message|> ", "", "", []),
    # --- written otherwise ---
    ("in the wrong channel", f"<|channel|>analysis to=functions.get_weather code<|message|>{PARIS}",
     "", "", [("get_weather", PARIS)]),
    ("the namespace left out", f"<|channel|>commentary to=get_weather<|message|>{PARIS}", "", "",
     [("get_weather", PARIS)]),
    ("a name that no tool has", "<|channel|>commentary to=functions.f.g<|message|>{}<|call|>", "",
     "", [("f.g", "{}")]),
    ("the channel twice", "<|channel|>commentary to=functions.now<|channel|>commentary "
     "<|constrain|>json<|message|>{}<|call|>", "", "", [("now", "{}")]),
    ("the end left out", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final"
     "<|message|>Paris.", "Hm.", "Paris.", []),
    ("the role left out", "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>P.",
     "Hm.", "P.", []),
    ("the role repeated", "<|start|>assistant<|channel|>final<|message|>P.", "", "P.", []),
    ("two ends", "<|channel|>final<|message|>P.<|end|><|return|>", "", "P.", []),
    # --- damaged: nothing is lost ---
    ("no header", "Paris.", "", "Paris.", []),
    ("a word like a header", "to", "", "to", []),
    ("another channel", "<|channel|>whisper<|message|>Psst.<|end|>", "", "Psst.", []),
    ("a tool that is not there", "<|channel|>commentary to=browser.search<|message|>{}<|call|>", "",
     "{}", []),
    ("a tool in reasoning", "<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", "",
     []),
    ("no name", "<|channel|>commentary to=functions.<|message|>{}<|call|>", "", "{}", []),
    ("a header that never ends", "<|channel|>final, I think, of it", "",
     "<|channel|>final, I think, of it", []),
    ("a long header", "<|channel|>" + "a" * 600 + "<|message|>b", "",
     "<|channel|>" + "a" * 600 + "<|message|>b", []),
    ("markers in a header", "<|channel|><|channel|>final<|message|>P.", "", "<|channel|>\nP.", []),
    ("a turn of the user", "<|channel|>final<|message|>P.<|end|><|start|>user<|message|>Q<|end|>",
     "", "P.<|end|><|start|>user<|message|>Q", []),
    ("markers that are spoken of", "<|channel|>final<|message|>`<|end|>` ends, `<|start|>` begins, "
     "`<|channel|>` follows; <|message|>.", "",
     "`<|end|>` ends, `<|start|>` begins, `<|channel|>` follows; <|message|>.", []),
    ("text behind an end", "<|channel|>final<|message|>P.<|return|> and", "", "P.<|return|> and",
     []),
    ("no arguments", "<|channel|>commentary to=functions.now<|message|>  now!<|call|>", "",
     "  now!", []),
    ("a list", "<|channel|>commentary to=functions.now<|message|>[1]<|call|>", "", "[1]", []),
    ("arguments that break", '<|channel|>commentary to=functions.now<|message|>{"a": one}<|call|>'
     "<|start|>assistant<|channel|>final<|message|>P.", "", "P.", [("now", '{"a": one}')]),
    ("text behind arguments", "<|channel|>commentary to=functions.now<|message|>{} \n so<|call|>",
     "", "so", [("now", "{}")]),
    ("markers in arguments", '<|channel|>commentary to=functions.now<|message|>{"a": "<|end|>b"}',
     "", "", [("now", '{"a": "<|end|>b"}')]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [one[1:] for one in REPLIES],
    ids=[r[0] for r in REPLIES],
)
def test_replies(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Whole, cut into two at every place, and one character at a time."""
    expected = (reasoning, content, calls)
    message = FORMAT.parse(text)
    assert said(message) == expected
    assert all(call.id.startswith("call_") for call in message.calls)
    shown = text.removesuffix("<|endoftext|>")  # only the last piece of a reply hides it
    for cut in range(len(shown) + 1):
        assert said(streamed(FORMAT, [shown[:cut], shown[cut:]])) == expected, cut
    assert said(streamed(FORMAT, list(shown))) == expected


FRAGMENTS = [
    *(
        *HARMONY.markers,
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=",
        "functions.",
        "now",
    ),
    *(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.now",
    ),
    *(" json", '{"a": ', "1}", "{", "}", '"', "\\", "\n", " ", "<", "<|", "|>", "t", "o", "Hello"),
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{PARIS}<|call|>",
    THINKS,
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=16).map("".join)
formats = st.builds(
    MessageFormat,
    tool_format=st.sampled_from([None, HARMONY]),
    tool_names=st.just(NAMES),
    max_calls=st.sampled_from([None, 1]),
    tags=st.just(CHANNELS),
    opened=st.sampled_from([None, "", "<|channel|>", "<|channel|>final<|message|>", " to="]),
)


@given(formats, texts, st.lists(st.integers(0, 999), max_size=6))
@example(FORMAT, "<|channel|>" + "a" * 501 + "<|message|>b", [])
def test_pieces_say_what_the_whole_says(
    message_format: MessageFormat, text: str, cuts: list[int]
) -> None:
    whole = message_format.parse(text)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for pieces in ([text[a:b] for a, b in pairwise(places)], list(text)):
        assert said(streamed(message_format, pieces)) == said(whole)


letters = st.text(st.sampled_from('ab <|é\n{}["end'), min_size=1, max_size=12)
values = st.dictionaries(letters, letters | st.integers() | st.none(), max_size=3)
messages = st.lists(
    st.tuples(st.just("reasoning"), letters)
    | st.tuples(st.sampled_from(["content", "preamble"]), letters)
    | st.tuples(st.sampled_from(NAMES), values),
    max_size=5,
)


@given(messages, st.booleans(), st.lists(st.booleans(), min_size=6, max_size=6))
def test_any_messages_are_found(
    made: list[tuple[str, Any]], ends: bool, variants: list[bool]
) -> None:
    """Written in either of the two orders that the format knows, and read back."""
    channels = {"reasoning": "analysis", "content": "final", "preamble": "commentary"}
    written, expected = [], Message()
    for (kind, value), variant in zip(made, variants, strict=False):
        if kind in channels:
            written.append(f"<|channel|>{channels[kind]}<|message|>{value}<|end|>")
            part = "reasoning" if kind == "reasoning" else "content"
            before = getattr(expected, part)
            setattr(expected, part, f"{before}\n{value}" if before else value)
            continue
        head = f"<|channel|>commentary to=functions.{kind} <|constrain|>json"
        if variant:
            head = f" to=functions.{kind}<|channel|>commentary json"
        arguments = json.dumps(value)
        written.append(f"{head}<|message|>{arguments}<|call|>")
        expected.add(CallDelta(len(expected.calls), arguments, "id", kind))
    text = "<|start|>assistant".join(written)
    if not ends:
        text = text.removesuffix("<|end|>").removesuffix("<|call|>")
    assert said(FORMAT.parse(text)) == said(expected)


def test_words_are_shown_as_they_come() -> None:
    stream = FORMAT.open()
    steps: list[tuple[str, list[Delta]]] = [
        ("<|channel|>", []),
        ("analysis", []),
        ("<|message|>", []),
        ("Hm", [ReasoningDelta("Hm")]),
        (", <", [ReasoningDelta(", ")]),
        ("b>", [ReasoningDelta("<b>")]),
        ("<|end|>", []),
        ("<|start|>assistant<|channel|>final<|message|>P", [TextDelta("P")]),
        ("aris.", [TextDelta("aris.")]),
        ("<|end|><|start|>assistant<|channel|>commentary to=functions.now json<|message|>", []),
    ]
    for text, deltas in steps:
        assert stream.feed(text) == deltas
    first, second = stream.feed('{"a": "x')
    assert isinstance(first, CallDelta) and (first.index, first.name) == (0, "now")
    assert second == CallDelta(0, '{"a": "x')
    assert stream.feed('y"}') == [CallDelta(0, 'y"}')]
    assert stream.finish("<|call|>") == [] and stream.has_calls


def test_plain_text_is_not_held_back() -> None:
    assert FORMAT.open().feed("Hello") == [TextDelta("Hello")]


def test_only_one_call_where_no_more_are_allowed() -> None:
    call = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    one = MessageFormat(HARMONY, NAMES, max_calls=1, tags=CHANNELS, opened="")
    assert len(one.parse(f"{call}<|start|>assistant{call}").calls) == 1


def test_calls_and_reasoning_are_read_as_they_are_asked_for() -> None:
    call = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    text = THINKS + call
    assert said(MessageFormat(None, tags=CHANNELS, opened="").parse(text)) == ("Hm.", "{}", [])
    without = MessageFormat(HARMONY, NAMES, opened="").parse(text)
    assert said(without) == ("", "Hm.", [("now", "{}")])


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ""),
        ("<|start|>assistant<|channel|>final<|message|>Par", "<|channel|>final<|message|>"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        ("<|start|>assistant<|channel|>final<|message|>Paris.<|end|>", None),
        ("<|start|>user<|message|>Hi<|end|>", None),
        ("Hi", None),
        ("", None),
    ],
)
def test_what_a_prompt_has_opened(prompt: str, opened: str | None) -> None:
    assert opened_header(prompt) == opened
    message_format = MessageFormat(HARMONY, NAMES, tags=CHANNELS, opened=opened)
    answer = "<|channel|>final<|message|>P."
    answers = {None: f"<|start|>assistant{answer}", "": answer}
    message = message_format.parse(answers.get(opened, "P."))
    is_reasoning = opened is not None and "analysis" in opened
    assert said(message) == (("P.", "", []) if is_reasoning else ("", "P.", []))


@pytest.mark.parametrize(
    ("text", "channel", "recipient"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json", "commentary", "functions.f"),
        (" to=functions.f<|channel|>commentary json", "commentary", "functions.f"),
        ("to=python<|channel|>analysis to=x <|constrain|>a/b", "analysis", "python"),
        ("<|channel|>final", "final", ""),
        ("", "final", ""),
    ],
)
def test_every_beginning_of_a_header_may_become_one(
    text: str, channel: str, recipient: str
) -> None:
    assert Header.read(text) == Header(channel, recipient)
    whole = f"{text}<|message|>"
    for size in range(len(whole)):
        assert may_become_header(whole[:size]), whole[:size]
    for wrong in ("\n", "<|end|>", "<|start|>", "?"):
        assert not may_become_header(f"{text}{wrong}")


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("<|end|>" * 8_000, 7),
        ("<|channel|>" * 8_000, 88_000),
        ("<|start|>assistant<|channel|>" * 3_000, 29),
        ("<|channel|>final<|message|>" + "<" * 60_000, 1),
        ("<|channel|>final" + " " * 60_000, 1),
        ("<|channel|>commentary to=functions.now<|message|>" + " " * 60_000, 1),
    ],
)
def test_models_that_are_stuck_cost_little(text: str, piece: int) -> None:
    stream, started = FORMAT.open(), time.process_time()
    for at in range(0, len(text), piece):
        stream.feed(text[at : at + piece])
    stream.finish()
    assert time.process_time() - started < 4
