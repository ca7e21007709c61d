"""What models write: tool calls and reasoning, whole and cut up."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from quire.config.reply_formats import (
    CHANNELS,
    MISTRAL_NAMES_FIRST,
    REASONING_PARSERS,
    THINK,
    TOOL_FORMATS,
)
from quire.text.deltas import CallDelta, Message
from quire.text.message_stream import MessageFormat
from tests.fuzz.target import Target

NAMES = ("add", "f", "get_weather")
OPENED = (None, "", CHANNELS.start, "<|channel|>final<|message|>", " to=")
MARKERS = [marker for one in TOOL_FORMATS.values() for marker in one.markers]


class ToolCalls(Target):
    """However a text is cut up, the pieces say what the whole says."""

    name = "tool_calls"
    tokens = tuple(
        word.encode()
        for word in (
            *MARKERS,
            *('{"name": "add", "arguments": ', '"name"', '"arguments"', '"parameters"', '"add"'),
            *("{", "}", "[", "]", ":", ",", ";", '"', "\\", "\\u00e9", "\\ud800", "\n", " ", "\t"),
            *("<|start|>assistant", "<|channel|>final", "to=functions.add", "<|channel|>analysis"),
            *("true", "null", "-1.5e3", "add", "get_weather", "<think>", "</think>", "<|eom|>"),
        )
    )

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        chance = random.Random(zlib.crc32(data))
        for style in chance.sample((*TOOL_FORMATS.values(), MISTRAL_NAMES_FIRST), 2):
            check_text(
                MessageFormat(
                    style,
                    NAMES,
                    max_calls=chance.choice((None, None, 1)),
                    tags=chance.choice((None, THINK, CHANNELS)),
                    starts_in_reasoning=chance.random() < 0.3,
                    opened=chance.choice(OPENED),
                ),
                text,
                chance,
            )


class Reasoning(Target):
    """The same for reasoning alone."""

    name = "reasoning"
    tokens = tuple(
        word.encode()
        for tags in REASONING_PARSERS.values()
        for word in (tags.start, tags.end, tags.start[:-1], tags.end[1:], " ", "\n", "Well.")
    )

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        chance = random.Random(zlib.crc32(data))
        for tags in chance.sample(list(dict.fromkeys(REASONING_PARSERS.values())), 2):
            message_format = MessageFormat(
                tags=tags, starts_in_reasoning=chance.random() < 0.5, opened=chance.choice(OPENED)
            )
            message = check_text(message_format, text, chance)
            said = f"{message.reasoning}{message.content}".split()
            # The first tags are taken away, white space around them too; no more than that.
            shorter, longer = sum(map(len, said)), sum(map(len, text.split()))
            least = longer - len(tags.start) - len(tags.end)
            # Channels have a header for each message.
            assert (tags == CHANNELS or least <= shorter) and shorter <= longer, (shorter, longer)


def check_text(message_format: MessageFormat, text: str, chance: random.Random) -> Message:
    whole = message_format.parse(text)
    for pieces in (_pieces(text, chance), _characters(text)):
        stream, message, begun = message_format.open(), Message(), []
        for deltas in (*map(stream.feed, pieces), stream.finish()):
            for delta in deltas:
                message.add(delta)
                if isinstance(delta, CallDelta) and delta.name is not None:
                    begun.append(delta.index)
        assert _without_ids(message) == _without_ids(whole), (message_format, text)
        assert begun == list(range(len(whole.calls))) and stream.has_calls == bool(begun)
    return whole


def _pieces(text: str, chance: random.Random) -> Iterator[str]:
    cuts = {chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12))}
    for start, end in pairwise(sorted({0, len(text), *cuts})):
        yield text[start:end]


def _characters(text: str) -> Iterator[str]:
    """One by one, as far as that is quick."""
    yield from text[:500]
    yield text[500:]


def _without_ids(message: Message) -> Any:
    return message.content, message.reasoning, [(one.name, one.arguments) for one in message.calls]
