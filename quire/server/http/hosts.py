"""`Hosts`: by which names a server may be called, so that no page can reach it under its own.

A web page may be of a site whose name its owner points at this machine after it was loaded (DNS
rebinding): to the browser the server is then that site, and the page may read all it answers. The
`Host` header still has the site's name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.server import NetworkOptions
from quire.server.http.auth import AccessDenied

MISDIRECTED = 421
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:\[\]@/]*))(?::\d*)?")


@dataclass(frozen=True)
class Hosts:
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
