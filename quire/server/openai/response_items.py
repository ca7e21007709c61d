"""The output items of a response, whole or as the typed events of a stream."""

from __future__ import annotations

from typing import Any

from quire.server.openai.stream import encode


class EventWriter:
    """Writes events, whose numbers go up through the stream."""

    def __init__(self) -> None:
        self._next = 0

    def take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def event(self, kind: str, **content: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.take_number(), **content}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))


class MessageItem:
    """What the model says to the user: an item with one part of text."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self._id = item_id
        self._part = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._place = {"output_index": output_index}
        kind = b"response.output_text.delta"
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (
            kind,
            kind,
            encode(self._part)[1:-1],
        )
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs

    def record(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._content("".join(self._texts))]
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _content(self, text: str) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def opening(self, writer: EventWriter) -> bytes:
        added = writer.event(
            "response.output_item.added", **self._place, item=self.record("in_progress")
        )
        part = self._content("")
        return added + writer.event("response.content_part.added", **self._part, part=part)

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Add to the text; this runs for every token."""
        self.add(text, logprobs)
        if not text and not logprobs:
            return b""  # held back: it may be the beginning of a stop string
        return b'%b%d,"logprobs":%b,"delta":%b}\n\n' % (
            self._delta_head,
            writer.take_number(),
            encode(logprobs),
            encode(text),
        )

    def closing(self, writer: EventWriter, status: str) -> bytes:
        text = "".join(self._texts)
        done = {"text": text, "logprobs": self._logprobs}
        return b"".join(
            [
                writer.event("response.output_text.done", **self._part, **done),
                writer.event("response.content_part.done", **self._part, part=self._content(text)),
                writer.event("response.output_item.done", **self._place, item=self.record(status)),
            ]
        )
