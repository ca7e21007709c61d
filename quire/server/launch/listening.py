"""Where a server is spoken to: its port and how many connections it may have."""

from __future__ import annotations

import resource
import socket

from quire.config.server import ServerOptions
from quire.protocol.errors import QuireError


class ServerStopped(QuireError):
    """The server cannot start or go on; the message says why and what to do."""


def allow_many_connections() -> None:
    """As many open files as the system lets this process have, instead of as many as is usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bind(options: ServerOptions) -> socket.socket:
    """The port is taken before the model is loaded: one that is in use is known at once."""
    host, port = options.network.host, options.network.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServerStopped(
            f"cannot listen on host={host!r}, port={port}: {error.strerror}. Stop what uses it, or "
            "choose another --port or --host."
        ) from None
    listener.set_inheritable(True)
    return listener
