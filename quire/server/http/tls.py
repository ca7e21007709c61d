"""Files for HTTPS are tried before the model is loaded: bad ones are known at once."""

from __future__ import annotations

import ssl

from quire.config.server import NetworkOptions
from quire.protocol.errors import OptionError


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
