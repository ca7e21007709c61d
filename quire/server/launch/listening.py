"""Where a server is spoken to: its port, how many connections it may have, and its files for HTTPS.
All are tried before the model is loaded: what cannot work is known at once."""

from __future__ import annotations

import resource
import socket
import ssl

from quire.config.server import NetworkOptions, ServerOptions
from quire.protocol.errors import OptionError, QuireError


class ServerStopped(QuireError):
    """The server cannot start or go on; the message says why and what to do."""


def allow_many_connections() -> None:
    """As many open files as the system lets this process have, instead of as many as is usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bind(options: ServerOptions) -> socket.socket:
    """The socket that API processes accept connections from."""
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


def check_tls(network: NetworkOptions) -> None:
    """Raise `OptionError` if HTTPS is wanted and its files cannot be used."""
    if network.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password to try, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(network.ssl_certfile, network.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"ssl_certfile={network.ssl_certfile!r} with ssl_keyfile={network.ssl_keyfile!r} "
            f"cannot be used: {error}. Give a certificate and the private key that belongs to it, "
            "as PEM files without a password."
        ) from None
    if network.ssl_ca_certs is None:
        return
    try:
        context.load_verify_locations(network.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"ssl_ca_certs={network.ssl_ca_certs!r} cannot be used: {error}. Give a PEM file with "
            "the certificates of the authorities."
        ) from None
