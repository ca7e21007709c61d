"""The output items of a response, whole or as the typed events of a stream."""

from __future__ import annotations

from typing import Any, Protocol

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


class Item(Protocol):
    """A part of the output, from its first event to its last."""

    def record(self, status: str) -> dict[str, Any]: ...

    def opening(self, writer: EventWriter) -> bytes: ...

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Add to the text; returns the event that says so."""
        ...

    def closing(self, writer: EventWriter, status: str) -> bytes: ...


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


class CallItem:
    """A call of a function that the client has."""

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        self._id = item_id
        self._call_id = call_id
        self._name = name
        self._place = {"output_index": output_index}
        self._part = {"item_id": item_id, "output_index": output_index}
        self._arguments: list[str] = []

    def record(self, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }

    def opening(self, writer: EventWriter) -> bytes:
        item = self.record("in_progress")
        return writer.event("response.output_item.added", **self._place, item=item)

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        if not text:
            return b""
        self._arguments.append(text)
        return writer.event("response.function_call_arguments.delta", **self._part, delta=text)

    def closing(self, writer: EventWriter, status: str) -> bytes:
        item = self.record(status)
        done = {"arguments": item["arguments"], "name": self._name}
        return writer.event(
            "response.function_call_arguments.done", **self._part, **done
        ) + writer.event("response.output_item.done", **self._place, item=item)


class ReasoningItem:
    """What the model thought before it answered."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self._id = item_id
        self._place = {"output_index": output_index}
        self._part = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._texts: list[str] = []

    def record(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._content()]
        return {
            "type": "reasoning",
            "id": self._id,
            "summary": [],
            "content": content,
            "encrypted_content": None,
            "status": status,
        }

    def _content(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def opening(self, writer: EventWriter) -> bytes:
        item = self.record("in_progress")
        added = writer.event("response.output_item.added", **self._place, item=item)
        part = self._content()
        return added + writer.event("response.content_part.added", **self._part, part=part)

    def delta(self, writer: EventWriter, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        self._texts.append(text)
        return writer.event("response.reasoning_text.delta", **self._part, delta=text)

    def closing(self, writer: EventWriter, status: str) -> bytes:
        part, item = self._content(), self.record(status)
        return b"".join(
            [
                writer.event("response.reasoning_text.done", **self._part, text=part["text"]),
                writer.event("response.content_part.done", **self._part, part=part),
                writer.event("response.output_item.done", **self._place, item=item),
            ]
        )
