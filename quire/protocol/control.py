"""Messages between the supervisor and the processes it starts: one line of JSON each, over pipes.

A child reads its orders from standard input, whose end tells it to end too, and reports on
standard output. Secrets travel here and so never show in a process list.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class StartEngine(msgspec.Struct, tag=True):
    """The first line to an engine process."""

    options: dict[str, Any]
    address: str
    log_level: str | None = None


class EngineReady(msgspec.Struct, tag=True):
    """From the engine to the supervisor, and on to API processes."""

    address: str
    options: dict[str, Any]
    """As resolved, by flat names."""
    num_blocks: int


class Failed(msgspec.Struct, tag=True):
    """A process cannot start, or cannot go on; why, and what to do about it."""

    cause: str


class StartApi(msgspec.Struct, tag=True):
    """The first line to an API process."""

    client_index: int
    socket_fd: int
    server_options: dict[str, Any]
    load_file: str
    """Where API processes count their requests (`server/http/load.py`)."""
    place: int
    """Of this process among them."""
    log_level: str | None = None


class EngineDown(msgspec.Struct, tag=True):
    cause: str
    restarts: bool
    """Whether a new engine is on its way."""


class Drain(msgspec.Struct, tag=True):
    """Take no new requests, finish the open ones, then end."""


class Ask(msgspec.Struct, tag=True):
    """Is it alive? An API process answers with `Answered`."""


class Answered(msgspec.Struct, tag=True):
    pass


class LogLevel(msgspec.Struct, tag=True):
    """From an API process that was told to log more or less, and on to all others."""

    level: str


class Listening(msgspec.Struct, tag=True):
    """From an API process: it answers."""


FromEngineProcess = EngineReady | Failed
ToApi = StartApi | EngineReady | EngineDown | Drain | LogLevel | Ask
FromApi = Listening | Failed | LogLevel | Answered


def line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_line(data: bytes, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)
