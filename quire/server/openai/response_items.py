"""The output items of a response, whole or as the typed events of a stream."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.server.http.reply import encode


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


class Item:
    """A part of the output, from its first event to its last. One with content has one part."""

    kind: ClassVar[str]
    has_content = True

    def __init__(self, item_id: str, output_index: int) -> None:
        self._id = item_id
        self._place = {"output_index": output_index}
        self._part: dict[str, Any] = {"item_id": item_id, "output_index": output_index}
        if self.has_content:
            self._part["content_index"] = 0
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def record(self, status: str) -> dict[str, Any]:
        """The item as it is now; before it is complete it has no content."""
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        raise NotImplementedError

    def _contents(self, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self._content()]

    def opening(self, writer: EventWriter) -> bytes:
        item = self.record("in_progress")
        added = writer.event("response.output_item.added", **self._place, item=item)
        if not self.has_content:
            return added
        part = self._content()
        return added + writer.event("response.content_part.added", **self._part, part=part)

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Add to the text; returns the event that says so."""
        self._texts.append(text)
        return writer.event(f"response.{self.kind}.delta", **self._part, delta=text)

    def _whole(self) -> dict[str, Any]:
        """What the event says that completes the text."""
        return {"text": self._text}

    def closing(self, writer: EventWriter, status: str) -> bytes:
        data = writer.event(f"response.{self.kind}.done", **self._part, **self._whole())
        if self.has_content:
            part = self._content()
            data += writer.event("response.content_part.done", **self._part, part=part)
        item = self.record(status)
        return data + writer.event("response.output_item.done", **self._place, item=item)


class MessageItem(Item):
    """What the model says to the user."""

    kind = "output_text"

    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        kind = b"response.output_text.delta"
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (
            kind,
            kind,
            encode(self._part)[1:-1],
        )
        self._logprobs: list[dict[str, Any]] = []

    def record(self, status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": self._contents(status),
        }

    def _content(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _whole(self) -> dict[str, Any]:
        return {"text": self._text, "logprobs": self._logprobs}

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Add to the text; this runs for every token."""
        self._texts.append(text)
        self._logprobs += logprobs
        if not text and not logprobs:
            return b""  # held back: it may be the beginning of a stop string
        return b'%b%d,"logprobs":%b,"delta":%b}\n\n' % (
            self._delta_head,
            writer.take_number(),
            encode(logprobs),
            encode(text),
        )


class CallItem(Item):
    """A call of a function that the client has."""

    kind = "function_call_arguments"
    has_content = False

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, output_index)
        self._call_id = call_id
        self._name = name

    def record(self, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._text,
            "status": status,
        }

    def _whole(self) -> dict[str, Any]:
        return {"arguments": self._text, "name": self._name}

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        return super().delta(writer, text, logprobs) if text else b""


class ReasoningItem(Item):
    """What the model thought before it answered."""

    kind = "reasoning_text"

    def record(self, status: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": self._id,
            "summary": [],
            "content": self._contents(status),
            "encrypted_content": None,
            "status": status,
        }

    def _content(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}
