"""`Dialect`: what protocols say differently where no route of theirs has run yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.server.anthropic import errors as anthropic
from quire.server.openai import errors as openai


@dataclass(frozen=True)
class Dialect:
    error_body: Callable[[int, str, str | None], dict[str, Any]]
    """From status, message and the field it is about."""
    id_headers: tuple[bytes, ...]
    """Headers of a reply that hold the request's id."""


OPENAI = Dialect(openai.error_body, (b"x-request-id",))
ANTHROPIC = Dialect(anthropic.error_body, (b"x-request-id", b"request-id"))


def dialect_of(path: str) -> Dialect:
    """What the client of a route speaks; OpenAI's, unless the route is another protocol's."""
    return ANTHROPIC if path == "/v1/messages" or path.startswith("/v1/messages/") else OPENAI
