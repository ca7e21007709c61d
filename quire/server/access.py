"""Who may call: keys are kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from quire.config.server import AccessOptions
from quire.protocol.errors import OptionError

ADMIN_PREFIX = "/admin/"
OPEN_PATHS = frozenset({"/", "/health", "/ping"})
"""Routes that need no key: they tell nothing that is worth one."""
STATIC_PREFIX = "/static/"
"""So do the files of the page at `/`."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class KeyRing:
    digests: tuple[bytes, ...]

    @classmethod
    def read(cls, options: AccessOptions) -> KeyRing:
        keys = list(options.api_key)
        if options.api_key_file is not None:
            try:
                text = Path(options.api_key_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(
                    f"api_key_file={options.api_key_file!r} cannot be read: {error}; give a file "
                    "with one key per line."
                ) from None
            found = [key for key in map(str.strip, text.splitlines()) if key]
            if not found:
                raise OptionError(f"api_key_file={options.api_key_file!r} holds no key.")
            keys += found
        return cls.of(keys)

    @classmethod
    def of(cls, keys: list[str]) -> KeyRing:
        if "" in keys:
            raise OptionError("a key is empty; leave it out if everyone may call.")
        if not all(key.isascii() for key in keys):
            raise OptionError(
                "a key has characters beyond ASCII, which HTTP headers lack; choose another."
            )
        return cls(tuple(_digest(key) for key in keys))

    @property
    def is_open(self) -> bool:
        return not self.digests

    @property
    def is_single(self) -> bool:
        return len(set(self.digests)) == 1

    def find(self, key: str) -> str | None:
        """A name for the holder of a key, or None if the key is not on the ring."""
        own = _digest(key)
        # Every digest is compared, so that the time taken tells nothing about which one matched.
        matches = [hmac.compare_digest(own, digest) for digest in self.digests]
        return own.hex()[:16] if any(matches) else None
