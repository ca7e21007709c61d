"""`Dialect`: what protocols say differently where no route of theirs has run yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import QuireError
from quire.server.anthropic import errors as anthropic
from quire.server.openai import errors as openai

ANTHROPIC_VERSION = b"anthropic-version"
"""A header that all requests of Anthropic's clients have."""


@dataclass(frozen=True)
class Dialect:
    error_body: Callable[[int, str, str | None, str | None], dict[str, Any]]
    """From status, message, the field it is about, and a code if the error has one."""
    message_of: Callable[[QuireError], str]
    """What an error says to this protocol's clients."""
    id_headers: tuple[bytes, ...]
    """Headers of a reply that hold the request's id."""


OPENAI = Dialect(openai.error_body, str, (b"x-request-id",))
ANTHROPIC = Dialect(anthropic.error_body, anthropic.message_of, (b"x-request-id", b"request-id"))


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """What the client of a route speaks: OpenAI's, unless the route is another protocol's, or both
    have it and the client says so."""
    if _is_under("/v1/messages", path):
        return ANTHROPIC
    says_so = ANTHROPIC_VERSION in headers
    return ANTHROPIC if says_so and _is_under("/v1/models", path) else OPENAI


def _is_under(route: str, path: str) -> bool:
    return path == route or path.startswith(route + "/")
