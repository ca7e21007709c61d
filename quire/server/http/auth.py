"""`Access`: who may call, and for which tenant. `Hosts`: by which names. Keys are kept as digests
and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.config.server import AccessOptions, NetworkOptions
from quire.protocol.errors import OptionError

ADMIN_PREFIX = "/admin/"
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ping"})
"""Routes that need no key: they tell nothing that is worth one."""
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that read folders of this machine."""
STATIC_PREFIX = "/static/"
"""So do the files of the pages."""
ENGINE_PATHS = frozenset({"/metrics", "/dashboard/state", "/dashboard/experts"})
"""Routes that count what the prefix cache did for all tenants."""
MAX_TENANT_CHARACTERS = 128
MISDIRECTED = 421
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:\[\]@/]*))(?::\d*)?")


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


class Tenant(NamedTuple):
    """For whom a request is made."""

    name: str = ""
    shares_prefixes: bool = False
    """Whether its prompts may use what others computed, which replies then must not tell."""


class AccessDenied(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Access:
    keys: KeyRing
    admin_keys: KeyRing
    trusts_tenant_header: bool = False
    share_prefix_cache: bool = False

    @classmethod
    def of(cls, options: AccessOptions) -> Access:
        admin = [] if options.admin_key is None else [options.admin_key]
        return cls(
            KeyRing.read(options),
            KeyRing.of(admin),
            options.trust_tenant_header,
            options.share_prefix_cache,
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether there are several tenants, and one prefix cache for all of them."""
        return self.share_prefix_cache and (self.trusts_tenant_header or self._has_several_keys)

    def admit(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Tenant:
        """The tenant of a request, or `AccessDenied`."""
        if path in OPEN_PATHS or path.startswith(STATIC_PREFIX):
            return Tenant()
        return Tenant(
            self._holder(path, dict(headers)) + self._named(headers), self.shares_prefixes
        )

    def sees_all(self, tenant: Tenant) -> bool:
        """Whether a caller may know everyone's requests by name: not one of several tenants."""
        return tenant.name == "" or not (self.trusts_tenant_header or self._has_several_keys)

    @property
    def _has_several_keys(self) -> bool:
        return not (self.keys.is_open or self.keys.is_single)

    def _holder(self, path: str, headers: dict[bytes, bytes]) -> str:
        """A name for who holds the key of a request; empty where all callers are one."""
        keys, wanted = self.keys, "API key"
        if path in ENGINE_PATHS and self.shares_prefixes:
            keys, wanted = self.admin_keys, "admin key"
            if keys.is_open:
                raise AccessDenied(
                    403,
                    f"{path} would tell tenants about each other's prompts under "
                    "--share-prefix-cache; start the server with --admin-key and send that key.",
                )
        elif self._is_for_admin(path) and not self.admin_keys.is_open:
            keys, wanted = self.admin_keys, "admin key"
        if keys.is_open:
            return ""
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() != "bearer":
            key = headers.get(b"x-api-key", b"").decode("latin-1")
        holder = keys.find(key.strip())
        if holder is None:
            raise AccessDenied(
                401,
                f"the {wanted} is missing or wrong; send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
            )
        return "" if keys.is_single else holder

    @staticmethod
    def _is_for_admin(path: str) -> bool:
        return path.startswith(ADMIN_PREFIX) or path in ADAPTER_PATHS

    def _named(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Which of the holder's tenants a trusted header names."""
        if not self.trusts_tenant_header:
            return ""
        names = [value.decode("latin-1") for name, value in headers if name == b"x-tenant"]
        if len(names) > 1:
            raise AccessDenied(400, "X-Tenant is given more than once; send it once.")
        name = "".join(names)
        if len(name) > MAX_TENANT_CHARACTERS:
            raise AccessDenied(
                400,
                f"X-Tenant has {len(name)} characters; send at most {MAX_TENANT_CHARACTERS}.",
            )
        return f"/{name}" if name else ""


@dataclass(frozen=True)
class Hosts:
    """Names by which the server may be called, so that no page can reach it under its own.

    A web page may be of a site whose name its owner points at this machine after it was loaded (DNS
    rebinding): to the browser the server is then that site, and the page may read all it answers.
    The `Host` header still has the site's name.
    """

    listens_on: str
    names: tuple[str, ...] | None
    """Those that are allowed beside the loopback ones; None: any."""

    @classmethod
    def of(cls, options: NetworkOptions) -> Hosts:
        listens_on = options.host.lower()
        allowed = tuple(name.lower() for name in options.allowed_hosts)
        if "*" in allowed or not (allowed or _reaches_loopback(listens_on)):
            return cls(listens_on, None)
        return cls(listens_on, (listens_on, *allowed))

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise `AccessDenied` for a request to another host. Browsers always name one."""
        if self.names is None:
            return
        for name, value in headers:
            if name == b"host" and value and not self._is_allowed(value.decode("latin-1")):
                raise AccessDenied(
                    MISDIRECTED,
                    f"Host {value.decode('latin-1')!r} is no name of this server, which listens on "
                    f"{self.listens_on}; call it by localhost or an address such as 127.0.0.1, or "
                    "start it with --allowed-hosts NAME.",
                )

    def _is_allowed(self, value: str) -> bool:
        assert self.names is not None
        found = _HOST.fullmatch(value.lower())
        if found is None:
            return False
        name = found[1] or found[2].removesuffix(".")
        return _is_loopback(name) or any(_matches(name, allowed) for allowed in self.names)


def _matches(name: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return name.endswith(allowed[1:]) and name != allowed[1:]
    return name == allowed


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _reaches_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be called from this machine alone."""
    try:
        return _is_loopback(host) or _is_loopback(socket.gethostbyname(host))
    except OSError:
        return False  # an address of IPv6, such as ::
