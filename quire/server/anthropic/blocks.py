"""The content blocks of a message, whole or as the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from quire.server.http.reply import encode
from quire.text.deltas import ToolCall


def event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **content}))


class Block:
    """A content block, from its first event to its last."""

    def __init__(self, index: int, empty: dict[str, Any]) -> None:
        self._index = index
        self._empty = empty

    def opening(self) -> bytes:
        return event("content_block_start", index=self._index, content_block=self._empty)

    def delta(self, text: str) -> bytes:
        """Add to the text."""
        raise NotImplementedError

    def _delta_event(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def closing(self) -> bytes:
        return event("content_block_stop", index=self._index)


class TextBlock(Block):
    """What the model says to the user."""

    def __init__(self, index: int) -> None:
        super().__init__(index, self.record(""))
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % index
        )

    @staticmethod
    def record(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "citations": None}

    def delta(self, text: str) -> bytes:
        """Add to the text; this runs for every token."""
        if not text:
            return b""  # held back: it may be the beginning of a stop sequence
        return b"%b%b}}\n\n" % (self._delta_head, encode(text))


class ThinkingBlock(Block):
    """What the model thought before it answered."""

    def __init__(self, index: int) -> None:
        super().__init__(index, self.record(""))

    @staticmethod
    def record(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, "signature": ""}

    def delta(self, text: str) -> bytes:
        return self._delta_event(type="thinking_delta", thinking=text)


class ToolBlock(Block):
    """A call of a tool that the client has."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}})

    @staticmethod
    def record(call: ToolCall) -> dict[str, Any]:
        """Arguments that were cut off are no object: they are given as the text they are."""
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = {"partial_json": call.arguments}
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def delta(self, text: str) -> bytes:
        return self._delta_event(type="input_json_delta", partial_json=text) if text else b""
