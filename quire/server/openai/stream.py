"""Chunks of a streamed reply, put together from bytes: this runs for every token."""

from __future__ import annotations

from typing import Any

from quire.protocol.output import RequestProgress
from quire.server.http.reply import encode, encoded


class ChunkWriter:
    """Writes chunks of one reply. What all of them share is encoded once."""

    def __init__(
        self, response_id: str, kind: str, created: int, model: str, *, tells_usage: bool = False
    ) -> None:
        """`tells_usage`: the last chunk will, and others say that they do not."""
        shared = {"id": response_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + encode(shared)[:-1] + b',"choices":['
        self._nothing_else: dict[str, Any] = {"usage": None} if tells_usage else {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def text(self, index: int, text: str, before: bytes, after: bytes) -> bytes:
        """A chunk with nothing but text in it; `before` and `after` surround the text."""
        parts = self._plain.get(index)
        if parts is None:
            end = b',"usage":null}\n\n' if self._nothing_else else b"}\n\n"
            parts = (
                self._head + b'{"index":%d,' % index + before,
                after + b',"logprobs":null,"finish_reason":null}]' + end,
            )
            self._plain[index] = parts
        return parts[0] + encode(text) + parts[1]

    def choice(self, choice: dict[str, Any], **extra: Any) -> bytes:
        """A chunk with one choice, and what else it says at the top level."""
        extra = self._nothing_else | extra
        write = encoded if "prompt_logprobs" in choice or "prompt_logprobs" in extra else encode
        tail = b"," + write(extra)[1:] if extra else b"}"
        return self._head + write(choice) + b"]" + tail + b"\n\n"

    def progress(self, progress: RequestProgress) -> bytes:
        """How a prompt gets on whose first token is not there yet."""
        record = {
            "prompt_tokens": progress.prompt_tokens,
            "processed_tokens": progress.processed_tokens,
            "cached_tokens": progress.cached_tokens,
            "eta_s": progress.eta_s,
        }
        return self.bare(progress=record)

    def bare(self, **extra: Any) -> bytes:
        """A chunk without a choice."""
        return self._head + b"]," + encode(extra)[1:] + b"\n\n"
