"""What an API process and the processes that prepare its requests say to each other.

A job is its header, the route's path and the body. The answer is frames, each with its kind and its
length: a head, prompts in pieces that take no loop long, and the end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.frontend.inputs import Prompt
from quire.frontend.pooling import PoolingParams
from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.http.errors import StructuredFields
from quire.server.preparation.prepare import Prepared
from quire.text.message_stream import MessageFormat

JOB = struct.Struct("!IQ?")
"""Length of the path, length of the body, whether it is a large one."""
FRAME = struct.Struct("!BQ")
ORDER = struct.Struct("!cQ")
"""To the process that forks: what to do (`FORK`, `END`), and the number of the fork."""
ENDED = struct.Struct("!QiH")
"""And back: its number, its exit status, the length of what it was doing, which follows."""
FORK, END = b"F", b"E"
READY = (1 << 64) - 1
"""In the place of a number: the process has loaded and takes orders."""

HEAD, PROMPTS, CONTENT, DONE = range(4)
TOO_MUCH_MEMORY = "the body takes more memory to read than there is for it; send less."
MAX_TEMPLATE_S = 2
"""Of computing: a template that waits for a core is not to blame."""
PIECE_BYTES = 1 << 18
"""Of a message; what is longer is cut, so that other work comes between."""
MAX_KEPT_BYTES = 1 << 18
"""Of a body, for the sake of its reply."""


class Log(msgspec.Struct, array_like=True):
    level: int
    text: str


class Head(msgspec.Struct, tag=True):
    """A `Prepared` but for its prompts, which follow."""

    body: str
    """JSON, which may hold half a character."""
    model: str
    num_prompts: int
    sampling: SamplingParams | None = None
    beams: BeamSearchParams | None = None
    pooling: PoolingParams | None = None
    format: MessageFormat | None = None
    echoes: list[str] | None = None
    structured_fields: StructuredFields | None = None


class Content(msgspec.Struct, tag=True):
    """A whole reply of so many bytes follows."""


class Refusal(msgspec.Struct, tag=True):
    """An error to raise again."""

    kind: str
    message: str
    fields: dict[str, Any] = {}
    """What the error has beyond its message."""

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        fields = {name: _within_64_bits(value) for name, value in vars(error).items()}
        return cls(type(error).__name__, str(error), fields)

    def error(self) -> Exception:
        kind = _error_kinds().get(self.kind)
        if kind is None:
            return RuntimeError(self.message)
        error = kind.__new__(kind, self.message)
        error.__dict__.update(self.fields)
        return error


def _within_64_bits(value: Any) -> Any:
    """Numbers that a client sent may be larger than what can be sent on."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return max(min(value, (1 << 63) - 1), -1 << 63) if is_number else value


def _error_kinds() -> dict[str, type[Exception]]:
    found: dict[str, type[Exception]] = {"RecursionError": RecursionError}
    kinds: list[type[QuireError]] = [QuireError]
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found


class End(msgspec.Struct):
    """The last frame of an answer."""

    logs: list[Log]
    is_spent: bool
    """Whether the process has grown and should be replaced."""


HEADS: Decoder[Head | Content | Refusal] = Decoder(Head | Content | Refusal)
PROMPT_LISTS: Decoder[list[Prompt]] = Decoder(list[Prompt])
ENDS: Decoder[End] = Decoder(End)


def frame(kind: int, data: bytes) -> bytes:
    return FRAME.pack(kind, len(data)) + data


def result_frames(made: Prepared | bytes) -> Iterator[bytes]:
    if isinstance(made, bytes):
        yield frame(HEAD, encode(Content()))
        for start in range(0, len(made), PIECE_BYTES):
            yield frame(CONTENT, made[start : start + PIECE_BYTES])
        return
    yield frame(HEAD, encode(_head(made)))
    batch: list[Prompt] = []
    size = 0
    for prompt in made.prompts:
        assert prompt.token_ids is not None
        prompt.given_ids = None
        batch.append(prompt)
        size += prompt.token_ids.nbytes + 4 * len(prompt.text or "") + 64
        if size > PIECE_BYTES:
            yield frame(PROMPTS, encode(batch))
            batch, size = [], 0
    yield frame(PROMPTS, encode(batch))


def _head(made: Prepared) -> Head:
    kept = json.dumps(made.body.kept_for_reply())
    if len(kept) > MAX_KEPT_BYTES:
        raise RequestError(
            f"the body has {len(kept)} bytes that its reply repeats, such as tools, metadata and "
            f"instructions, and at most {MAX_KEPT_BYTES} are repeated; send less."
        )
    params = made.params
    return Head(
        kept,
        made.model,
        len(made.prompts),
        params if isinstance(params, SamplingParams) else None,
        params if isinstance(params, BeamSearchParams) else None,
        params if isinstance(params, PoolingParams) else None,
        made.format,
        made.echoes,
        made.structured_fields,
    )


def from_head(head: Head, body: type[Any], prompts: list[Prompt]) -> Prepared:
    params = head.sampling or head.beams or head.pooling
    assert params is not None
    return Prepared(
        body.from_kept(json.loads(head.body)),
        head.model,
        prompts,
        params,
        head.format or MessageFormat(),
        head.echoes,
        head.structured_fields or StructuredFields(),
    )
