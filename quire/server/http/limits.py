"""Limits on the bodies of requests: `BodyLimit` for each, `BodyMemory` for all at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from quire.protocol.errors import OverloadedError

MAX_HELD_BODIES = 8
"""Bodies of the largest size that an API process keeps in memory."""


class BodyLimit:
    """The size of one body, as its header claims it and as it comes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.message = f"the body is larger than max_body_bytes={max_bytes}; send less."

    def refuses(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request says that its body is too large."""
        text = headers.get(b"content-length", b"")
        return text.isdigit() and int(text) > self._max_bytes

    def bounded(self, receive: Receive) -> Receive:
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                # FastAPI makes a 400 of other exceptions while it reads a body.
                raise HTTPException(413, self.message)
            return message

        return bounded


class BodyMemory:
    """Bytes of all bodies that one API process reads, or that wait to be prepared."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = MAX_HELD_BODIES * max_body_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def holding(self) -> Iterator[HeldBody]:
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes

    def take(self, count: int) -> None:
        """Raises `OverloadedError` where bodies already hold all the memory that they may."""
        held, most = self.num_bytes, self._max_bytes
        if held and held + count > most:
            raise OverloadedError(
                f"{held} bytes of request bodies are being read, and at most {most} may be; try "
                "again, or send smaller bodies."
            )
        self.num_bytes += count


class HeldBody:
    """The bytes of one body, from its first on until it is prepared."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.pieces: list[bytes] = []
        self.num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._memory.take(len(piece))
        self.num_bytes += len(piece)
        self.pieces.append(piece)
