"""Reads the stream of one answer as it arrives: when its pieces came and how many tokens it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import msgspec


class Event(NamedTuple):
    """What one event of a stream says."""

    text: str = ""
    has_token: bool = False
    """Whether tokens came with it; some have no text, such as half a character."""
    is_last: bool = False
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str | None = None


ReadEvent = Callable[[bytes], Event]


@dataclass
class TokenStream:
    """The answer to one request. `receive` takes its bytes; what is wrong ends up in `error`."""

    read_event: ReadEvent
    keeps_text: bool = False
    times: list[float] = field(default_factory=list)
    """When each piece with tokens arrived, by `perf_counter`."""
    texts: list[str] = field(default_factory=list)
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    """As the server counts them, if it does."""
    is_complete: bool = False
    error: str | None = None
    _rest: bytes = b""

    def receive(self, data: bytes) -> None:
        now = perf_counter()
        # An event is one line: every backend writes its JSON without line breaks.
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            self._take(line, now)

    def end(self) -> None:
        """After the last byte; a last line may lack its end."""
        if self._rest:
            self._take(self._rest, perf_counter())
            self._rest = b""

    def _take(self, line: bytes, now: float) -> None:
        line = line.strip()
        if line.startswith(b"data:"):
            line = line[5:].lstrip()
            if line == b"[DONE]":
                self.is_complete = True
                return
        if not line.startswith(b"{"):
            return  # empty lines, comments and other fields of server-sent events
        try:
            event = self.read_event(line)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"unreadable event ({error})"
            return
        self._note(event, now)

    def _note(self, event: Event, now: float) -> None:
        # The only token of an answer may have no text and come with the end.
        if event.has_token or (event.is_last and not self.times):
            self.times.append(now)
        if self.keeps_text:
            self.texts.append(event.text)
        if event.num_input_tokens is not None:
            self.num_input_tokens = event.num_input_tokens
        if event.num_output_tokens is not None:
            self.num_output_tokens = event.num_output_tokens
        self.is_complete = self.is_complete or event.is_last
        self.error = self.error or event.error
