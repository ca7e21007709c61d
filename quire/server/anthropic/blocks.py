"""The content blocks of a message, whole or as the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode


def event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **content}))


class TextBlock:
    """What the model says to the user."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % index
        )

    @staticmethod
    def record(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "citations": None}

    def opening(self) -> bytes:
        return event("content_block_start", index=self._index, content_block=self.record(""))

    def delta(self, text: str) -> bytes:
        """Add to the text; this runs for every token."""
        if not text:
            return b""  # held back: it may be the beginning of a stop sequence
        return b"%b%b}}\n\n" % (self._delta_head, encode(text))

    def closing(self) -> bytes:
        return event("content_block_stop", index=self._index)
