"""Where a server is: its URL, taken apart and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.protocol.errors import OptionError

if TYPE_CHECKING:
    import ssl

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Address:
    """A server, and the part of its URL that comes before every route."""

    host: str
    port: int
    root: str
    """Such as "/proxy"; empty as a rule."""
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads http://host:port, with or without the scheme, a path and /v1 at its end."""
        bad = OptionError(
            f"--url must be the address of a server such as {DEFAULT_URL}, got {url!r}."
        )
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise bad from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise bad
        if parts.query or parts.fragment or parts.username:
            raise OptionError(
                f"--url {url!r} must end with its path; a key goes to --api-key, other fields into "
                "the request."
            )
        is_secure = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), root, is_secure)

    def __str__(self) -> str:
        scheme = "https" if self.is_secure else "http"
        return f"{scheme}://{self.authority}{self.root}"

    @property
    def authority(self) -> str:
        """Host and port, as the header `Host` has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def route(self, path: str) -> str:
        return self.root + path

    def tls(self) -> ssl.SSLContext | None:
        if not self.is_secure:
            return None
        import ssl

        return ssl.create_default_context()


def request_headers(api_key: str | None) -> dict[str, str]:
    """Headers that every request has."""
    headers = {"Content-Type": "application/json", "User-Agent": "quire"}
    if api_key is not None:
        if not api_key.isascii() or not api_key.isprintable():
            raise OptionError("--api-key must consist of printable ASCII characters.")
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
