"""`MessageStream`: the text of one reply, taken apart as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quire.config.reply_formats import CHANNELS, HARMONY, ReasoningTags, ToolFormat
from quire.text.deltas import Delta, Message, TextDelta, merged
from quire.text.harmony import HarmonyStream
from quire.text.reasoning import ReasoningStream
from quire.text.tool_calls.call_stream import CallStream, new_call_id


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
    opened: str | None = None
    """Of a reply in channels: `opened_header` of its prompt."""
    hidden_ends: tuple[str, ...] = ()
    """Special tokens that may end a text, which are not shown."""

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and self.tags is None

    @property
    def has_channels(self) -> bool:
        """Whether replies are messages in Harmony's channels."""
        return self.tool_format == HARMONY or self.tags == CHANNELS

    @property
    def markers(self) -> list[str]:
        """Everything that is looked for in texts."""
        calls = [] if self.tool_format is None else list(self.tool_format.markers)
        channels = list(HARMONY.markers) if self.has_channels else []
        return calls + channels + ([] if self.tags is None else [self.tags.start, self.tags.end])

    def open(self) -> MessageStream:
        return MessageStream(self)

    def parse(self, text: str) -> Message:
        """A whole text. Streams say the same, in pieces."""
        message = Message()
        for delta in self.open().finish(text):
            message.add(delta)
        return message


class MessageStream:
    """One text. Reasoning comes first, then content and calls; in channels, all as it comes."""

    def __init__(self, format: MessageFormat) -> None:
        calls, tags = format.tool_format, format.tags
        self._stages: list[ReasoningStream | HarmonyStream | CallStream] = []
        """Each takes the text that those before it let through."""
        if tags is not None and tags != CHANNELS:
            self._stages.append(ReasoningStream(tags, format.starts_in_reasoning))
        if format.has_channels:
            self._stages.append(
                HarmonyStream(
                    format.opened,
                    format.tool_names,
                    partial(new_call_id, HARMONY),
                    reads_calls=calls == HARMONY,
                    reads_reasoning=tags == CHANNELS,
                    max_calls=format.max_calls,
                )
            )
        if calls is not None and calls != HARMONY:
            self._stages.append(CallStream(calls, format.tool_names, format.max_calls))
        # Channels close their messages themselves.
        closers = HARMONY.closers if format.has_channels else ()
        self._hidden_ends = tuple(one for one in format.hidden_ends if one not in closers)

    @property
    def has_calls(self) -> bool:
        return any(not isinstance(one, ReasoningStream) and one.has_calls for one in self._stages)

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = [TextDelta(text)] if text else []
        for stage in self._stages:
            deltas = _passed(deltas, stage)
        return merged(deltas)

    def finish(self, text: str = "") -> list[Delta]:
        """Take the last of the text."""
        text = text.removesuffix(next(filter(text.endswith, self._hidden_ends), ""))
        deltas: list[Delta] = [TextDelta(text)] if text else []
        for stage in self._stages:
            deltas = _passed(deltas, stage) + stage.finish()
        return merged(deltas)


def _passed(
    deltas: list[Delta], stage: ReasoningStream | HarmonyStream | CallStream
) -> list[Delta]:
    """What a stage makes of the text among `deltas`, in its place."""
    found: list[Delta] = []
    for delta in deltas:
        found += stage.feed(delta.text) if isinstance(delta, TextDelta) else [delta]
    return found
