"""What a generated text turns out to say, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what the reader sees."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call. The first one of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass
class Message:
    """A whole text, taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
        elif delta.name is not None:
            self.calls.append(ToolCall(delta.id or "", delta.name, delta.arguments))
        else:
            self.calls[delta.index].arguments += delta.arguments


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind put together; each call begins without arguments."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, CallDelta):
            if (
                isinstance(last, CallDelta)
                and last.name is None
                and delta.name is None
                and last.index == delta.index
            ):
                found[-1] = replace(last, arguments=last.arguments + delta.arguments)
                continue
        elif last is not None and type(last) is type(delta):
            assert not isinstance(last, CallDelta)
            found[-1] = replace(last, text=last.text + delta.text)
            continue
        found.append(delta)
    return found


def overlap(text: str, *markers: str) -> int:
    """How many characters at the end of `text` may be the beginning of one of the markers."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
