"""Messages between an API process and the engine's process, over a local socket.

A client numbers its calls and gets one `Reply` to each; outputs come unasked. Keys of sequences
begin with the client's index, so that the engine knows whose they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.protocol.errors import (
    EngineDeadError,
    ModelError,
    OptionError,
    OverloadedError,
    QuireError,
    RequestError,
)
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest

ID_SEPARATOR = "#"
"""Between the name that a caller gave a request and the key that makes it unique."""

NOTHING = msgspec.Raw(b"\xc0")  # None in msgpack

_ERRORS: dict[str, type[QuireError]] = {
    kind.__name__: kind for kind in (RequestError, EngineDeadError, OptionError, ModelError)
}


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


class Reply(msgspec.Struct, tag=True):
    call: int
    value: msgspec.Raw = NOTHING
    error: ErrorRecord | None = None


ToEngine = AddRequest | AbortRequest | Command
FromEngine = Outputs | Reply
