"""The processes of a slot's other ranks. Imports no torch, so that they can start before rank 0 has imported it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

END_MAX_S = 5.0
"""How long ranks may take to end after their sockets were shut down, before they are killed."""


@dataclass(frozen=True, kw_only=True)
class OtherRanks:
    """The ranks 1 and above of a slot, by the sockets on which they get their commands. `end` shuts the sockets down,
    by which the ranks end, and waits for that. `meeting`: the descriptor of an empty file, which they have too.
    """

    connections: tuple[socket.socket, ...]
    end: Callable[[], None]
    meeting: int


def start_processes(count: int) -> OtherRanks:
    """A process each. This process ends as soon as one of them does, whatever it is doing: it may be in a collective
    operation, and only the agent can start all of them again.
    """
    closing = threading.Event()
    meeting = new_meeting()
    started = [_start(meeting) for _ in range(count)]

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not closing.is_set():
            log.error("a rank of the slot ended; the worker ends", rank=rank, pid=process.pid, status=status)
            os._exit(1)

    watches = [
        threading.Thread(target=watch, args=(rank, process), name=f"rank-{rank}", daemon=True)
        for rank, (_, process) in enumerate(started, start=1)
    ]
    for one in watches:
        one.start()

    connections = tuple(connection for connection, _ in started)

    def end() -> None:
        closing.set()
        shut_down(connections)
        for one, (_, process) in zip(watches, started, strict=True):
            one.join(END_MAX_S)
            if one.is_alive():
                process.kill()
                one.join()

    return OtherRanks(connections=connections, end=end, meeting=meeting)


def new_meeting() -> int:
    """The descriptor of an empty file in memory, by which ranks meet. Nothing is left of it, however they end."""
    return os.memfd_create("tidepool-ranks")


def shut_down(connections: Iterable[socket.socket]) -> None:
    """Shut sockets down in both directions, whether or not the other end is there."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _start(meeting: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataplane.engines.torch.ranks.follower", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), meeting),
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
    return ours, process
