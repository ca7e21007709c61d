"""Reasoning is split off, in whole texts and in streams."""

from __future__ import annotations

import pytest

from quire.config.reply_formats import THINK
from quire.text.deltas import Message, ReasoningDelta, TextDelta
from quire.text.message_stream import MessageFormat


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nParis.", False, "Hm.", "Paris."),
        ("\n<think>Hm.</think>Paris. ", False, "Hm.", "Paris. "),
        ("Hm.\n</think>\n\nParis.", True, "Hm.", "Paris."),
        ("</think>Paris.", True, "", "Paris."),
        ("<think>Hm", False, "Hm", ""),
        ("Hm. </thi", True, "Hm. </thi", ""),
        ("Paris <think>Hm.</think>", False, "", "Paris <think>Hm.</think>"),
        ("<th", False, "", "<th"),
        ("  Paris", False, "", "  Paris"),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
    ],
)
def test_reasoning_is_split_off(text: str, inside: bool, reasoning: str, content: str) -> None:
    message_format = MessageFormat(tags=THINK, starts_in_reasoning=inside)
    assert message_format.parse(text) == Message(content, reasoning)


def test_reasoning_is_streamed() -> None:
    stream = MessageFormat(tags=THINK).open()
    assert stream.feed("<thi") == []
    assert stream.feed("nk>\n") == []
    assert stream.feed("One ") == [ReasoningDelta("One")]
    assert stream.feed("two.\n</") == [ReasoningDelta(" two.")]
    assert stream.feed("think>\n") == []
    assert stream.feed("\nThree") == [TextDelta("Three")]
    assert stream.finish(".") == [TextDelta(".")]
