"""Where a server is spoken to: its port, how many connections it may have, its own sockets."""

from __future__ import annotations

import os
import resource
import socket
import tempfile

from quire.config.server import ServerOptions
from quire.protocol.errors import QuireError

SOCKET_NAME_BYTES = 8
"""Of randomness, twice as many characters."""
MAX_SOCKET_PATH = 107
"""The system takes no longer ones."""


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


def make_socket_folder() -> str:
    """A new folder for sockets, which only this user can enter; it must not lie too deep."""
    folder = tempfile.mkdtemp(prefix="quire-")
    if len(os.fsencode(folder)) + 1 + 2 * SOCKET_NAME_BYTES > MAX_SOCKET_PATH:
        os.rmdir(folder)
        raise ServerStopped(
            f"TMPDIR={tempfile.gettempdir()!r} is too long a path for the server's sockets, whose "
            f"paths have at most {MAX_SOCKET_PATH} bytes; set it to a shorter one, such as /tmp."
        )
    return folder
