"""`MessageStream`: the text of one reply, taken apart as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.frontend.tools.call_stream import CallStream
from quire.frontend.tools.deltas import Delta, Message, TextDelta, merged
from quire.frontend.tools.formats import ToolFormat
from quire.frontend.tools.reasoning import ReasoningStream, ReasoningTags


@dataclass(frozen=True)
class MessageForm:
    """What the replies to one request may hold besides plain text."""

    format: ToolFormat | None = None
    """How calls are written; None: there are none."""
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    tags: ReasoningTags | None = None
    starts_in_reasoning: bool = False
    """Whether the prompt has opened the reasoning already."""

    @property
    def is_plain(self) -> bool:
        return self.format is None and self.tags is None

    def open(self) -> MessageStream:
        return MessageStream(self)

    def parse(self, text: str) -> Message:
        """A whole text. Streams say the same, in pieces."""
        stream, message = self.open(), Message()
        for delta in stream.feed(text) + stream.finish():
            message.add(delta)
        return message


class MessageStream:
    """One text. Reasoning comes first, then content and calls."""

    def __init__(self, form: MessageForm) -> None:
        self._reasoning = (
            ReasoningStream(form.tags, form.starts_in_reasoning) if form.tags else None
        )
        self._calls = (
            CallStream(form.format, form.tool_names, form.max_calls) if form.format else None
        )

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return merged(self._pass_on([TextDelta(text)] if text else []))
        return merged(self._pass_on(self._reasoning.feed(text)))

    def finish(self) -> list[Delta]:
        """No more text will come."""
        deltas = [] if self._reasoning is None else self._pass_on(self._reasoning.finish())
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
