"""Messages between the server's processes.

Between the supervisor and the processes it starts: one line of JSON each, over pipes. A child reads
its orders from standard input, whose end tells it to end too, and reports on standard output.
Secrets travel here and so never show in a process list.

Between an API process and the engine's process: msgpack over a local socket. A client numbers its
calls and gets one `Reply` to each; outputs come unasked. Keys of sequences begin with the client's
index, so that the engine knows whose they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.protocol.errors import (
    AdapterError,
    EngineDeadError,
    ModelError,
    OptionError,
    OverloadedError,
    QuireError,
    RankMissing,
    RequestError,
)
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest

ID_SEPARATOR = "#"
"""Between the name that a caller gave a request and the key that makes it unique."""

NOTHING = msgspec.Raw(b"\xc0")  # None in msgpack

_ERRORS: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        AdapterError,
        EngineDeadError,
        RankMissing,
        OptionError,
        ModelError,
    )
}


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
    """Where API processes count their requests (`Load` in `server/http/middleware.py`)."""
    place: int
    """Of this process among them."""
    log_level: str | None = None
    adapters_file: str | None = None
    """Where they write which adapters they were told of (`AdapterNames` in
    `server/preparation/adapter_names.py`)."""


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


def client_identity(client_index: int) -> bytes:
    """The name under which the engine's socket knows a client."""
    return b"client-%d" % client_index


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error that is raised again on the other side."""

    kind: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: Exception) -> ErrorRecord:
        if isinstance(error, OverloadedError):
            return cls("OverloadedError", str(error), error.retry_after_s)
        if isinstance(error, QuireError):
            return cls(type(error).__name__, str(error))
        return cls("", f"the engine failed on this call: {error!r}")

    def to_error(self) -> QuireError:
        if self.retry_after_s is not None:
            return OverloadedError(self.message, retry_after_s=self.retry_after_s)
        return _ERRORS.get(self.kind, QuireError)(self.message)


class AddRequest(msgspec.Struct, tag=True):
    call: int
    request: NewRequest


class AbortRequest(msgspec.Struct, tag=True):
    """End a request, or one sequence of it. There is no answer but its last output."""

    request_id: str
    reason: str = "abort"
    key: int | None = None


class Command(msgspec.Struct, tag=True):
    """One of `COMMANDS` in `engine/core.py`."""

    call: int
    name: str
    arguments: dict[str, Any]


class Outputs(msgspec.Struct, tag=True):
    output: StepOutput
    death: str | None = None
    """Why these are the engine's last ones, if they are."""


class Reply(msgspec.Struct, tag=True):
    call: int
    value: msgspec.Raw = NOTHING
    error: ErrorRecord | None = None


ToEngine = AddRequest | AbortRequest | Command
FromEngine = Outputs | Reply
