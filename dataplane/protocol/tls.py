"""TLS between control plane and node, in both directions: certificates and trusted authorities of a process."""

import ssl
from pathlib import Path


def check_tls_files(cert: Path | None, key: Path | None, authorities: Path | None) -> None:
    """Check the TLS files of a process before their first use.

    Raises:
        ValueError: one of certificate and key is missing, or a file holds something else.
    """
    if (cert is None) != (key is None):
        raise ValueError("tls_cert_file and tls_key_file must be set together")
    if cert is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"tls_cert_file {cert} and tls_key_file {key} cannot be used: {error}") from error
    if authorities is not None:
        client_context(authorities)


def client_context(authorities: Path | None) -> ssl.SSLContext:
    """A client context that trusts the authorities of a PEM file, or the system's.

    Raises:
        ValueError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls_ca_file {authorities} cannot be used: {error}") from error
