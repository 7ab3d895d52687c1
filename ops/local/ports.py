"""Free TCP ports on the loopback interface."""

import random
import socket

LOOPBACK = "127.0.0.1"
_FIRST, _END = 15_000, 32_000
"""Below the range from which Linux (32768 up) and macOS (49152 up) give ports to outgoing connections: a port from that
range may be taken by any connection before its server binds it, or while its server is being restarted."""
_TRIES_MAX = 1000
_given: set[int] = set()


def free_port() -> int:
    """A TCP port without a listener, never the same twice in a process.

    Raises:
        OSError: a thousand ports were tried, and all are taken.
    """
    for _ in range(_TRIES_MAX):
        port = random.randrange(_FIRST, _END)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port found between {_FIRST} and {_END}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
