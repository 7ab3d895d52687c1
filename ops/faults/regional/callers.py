"""Which process is at the other end of a local TCP connection, by /proc (on Linux)."""

import os
from contextlib import suppress
from pathlib import Path


def sockets_between(port: int, far_port: int) -> frozenset[str]:
    """The sockets at `port` that are connected to `far_port`, as /proc names them. A port alone may be that of several
    callers, each connected to another one.
    """
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    return frozenset(f"socket:[{row[9]}]" for row in rows if (_port(row[1]), _port(row[2])) == (port, far_port))


def holds(pid: int, sockets: frozenset[str]) -> bool:
    """Whether a process has one of these sockets open."""
    with suppress(OSError):
        folder = Path(f"/proc/{pid}/fd")
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(folder / name) in sockets:
                    return True
    return False


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
