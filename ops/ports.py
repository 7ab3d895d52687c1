"""Free TCP ports on the loopback interface."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A TCP port nobody listens on at this moment. Another process may still take it before its user binds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
