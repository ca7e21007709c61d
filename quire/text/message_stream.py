"""`MessageStream`: the text of one reply, taken apart as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.reply_formats import ReasoningTags, ToolFormat
from quire.text.deltas import Delta, Message, TextDelta, merged
from quire.text.reasoning import ReasoningStream
from quire.text.tool_calls.call_stream import CallStream


@dataclass(frozen=True)
class MessageFormat:
    """What the replies to one request may hold in addition to plain text."""

    tool_format: ToolFormat | None = None
    """How calls are written; None: there are none."""
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    tags: ReasoningTags | None = None
    starts_in_reasoning: bool = False
    """Whether the prompt has opened the reasoning already."""
    hidden_ends: tuple[str, ...] = ()
    """Special tokens that may end a text, which are not shown."""

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and self.tags is None

    @property
    def markers(self) -> list[str]:
        """Everything that is looked for in texts."""
        calls = [] if self.tool_format is None else list(self.tool_format.markers)
        return calls + ([] if self.tags is None else [self.tags.start, self.tags.end])

    def open(self) -> MessageStream:
        return MessageStream(self)

    def parse(self, text: str) -> Message:
        """A whole text. Streams say the same, in pieces."""
        message = Message()
        for delta in self.open().finish(text):
            message.add(delta)
        return message


class MessageStream:
    """One text. Reasoning comes first, then content and calls."""

    def __init__(self, format: MessageFormat) -> None:
        self._format = format
        self._reasoning = (
            ReasoningStream(format.tags, format.starts_in_reasoning) if format.tags else None
        )
        calls = format.tool_format
        self._calls = CallStream(calls, format.tool_names, format.max_calls) if calls else None

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.has_calls

    def feed(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return merged(self._pass_on([TextDelta(text)] if text else []))
        return merged(self._pass_on(self._reasoning.feed(text)))

    def finish(self, text: str = "") -> list[Delta]:
        """Take the last of the text."""
        ends = self._format.hidden_ends
        deltas = self.feed(text.removesuffix(next(filter(text.endswith, ends), "")))
        if self._reasoning is not None:
            deltas += self._pass_on(self._reasoning.finish())
        if self._calls is not None:
            deltas += self._calls.finish()
        return merged(deltas)

    def _pass_on(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.feed(delta.text) if isinstance(delta, TextDelta) else [delta]
        return found
