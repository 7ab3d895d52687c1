"""Several processes of one gateway: they share a port, and a supervisor starts again what ends."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from controlplane.api.process_group import GroupMember, bound_sockets
from ops.local.processes import Child
from ops.local.supervisor import Supervisor

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 40.0
"""Longer than the 20 s in which a process lets its streams end, and what it then writes."""


def run_api_processes(host: str, port: int, count: int, *, silence_max_s: float) -> None:
    """Run so many API processes until SIGTERM or SIGINT; a second signal kills them. `port`: 0 for a free one. One that
    does not answer for `silence_max_s` is killed and started again: the kernel would give it connections for ever.

    Raises:
        InvalidValueError: the port is in use by others, or the system cannot share one between processes.
        SupervisorError: the processes do not start.
    """
    log = structlog.get_logger()
    with _reserved(host, port) as found, tempfile.TemporaryDirectory(prefix="tidepool-api-") as folder:
        members = [GroupMember(folder=Path(folder), number=number) for number in range(count)]
        supervisor = Supervisor([_child(member, found, silence_max_s) for member in members], report=log.warning)
        supervisor.run(lambda: log.info("all processes listen", host=host, port=found, processes=count))


def _child(member: GroupMember, port: int, silence_max_s: float) -> Child:
    return Child(
        name=f"api-{member.number}",
        argv=(
            *(sys.executable, "-m", "ops.cli.main", "api"),
            *("--group", str(member.folder), "--number", str(member.number)),
        ),
        env=os.environ | {"TIDEPOOL_PORT": str(port)},
        log=None,
        ready=_tells(member),
        ready_timeout_s=_START_TIMEOUT_S,
        silence_max_s=silence_max_s,
        stop_timeout_s=_STOP_TIMEOUT_S,
    )


def _tells(member: GroupMember) -> Callable[[], bool]:
    """Whether the process tells its metrics, which it does while it serves."""

    def tells() -> bool:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1.0)
            asking.connect(str(member.socket_path))
            return bool(asking.recv(1))

    return tells


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Keep a port from others while the block runs. Sockets that do not listen receive no connections."""
    sockets = bound_sockets(host, port, shared=True)
    try:
        found: int = sockets[0].getsockname()[1]
        if port == 0:
            sockets += bound_sockets(host, found, shared=True)  # that port, at every address
        yield found
    finally:
        for one in sockets:
            one.close()
