"""Free TCP ports on the loopback interface."""

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST, _END = 15_000, 32_000
"""Below the range from which Linux (32768 up) and macOS (49152 up) give ports to outgoing connections: a port from that
range may be taken by any connection before its server binds it, or while its server is being restarted."""
_TRIES_MAX = 1000
_given: set[int] = set()


def free_port() -> int:
    """A TCP port without a listener. Until this process ends no other call gets the same, in any process of this user:
    a server that starts, or starts again, finds its port free.

    Raises:
        OSError: a thousand ports were tried, and all are taken; or the file of locks cannot be opened.
    """
    for _ in range(_TRIES_MAX):
        port = random.randrange(_FIRST, _END)
        if port not in _given and _is_free(port) and _reserve(port):
            _given.add(port)
            return port
    raise OSError(f"no free port found between {_FIRST} and {_END}")


def try_port(port: int) -> None:
    """Bind a port of the loopback interface, and close it again.

    Raises:
        OSError: it is taken, or this user may not have it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))


def _is_free(port: int) -> bool:
    try:
        try_port(port)
    except OSError:
        return False
    return True


def _reserve(port: int) -> bool:
    """Lock the byte of a file that stands for the port; the kernel unlocks it when this process ends."""
    locks = _locks()
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    return True


@cache
def _locks() -> int:
    """The file of locks, opened once: to close any descriptor of it would unlock all bytes."""
    path = Path(tempfile.gettempdir()) / f"tidepool-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
