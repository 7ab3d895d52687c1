"""The processes of ranks: their end ends this one, unless it has ended them."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.ranks import processes
from dataplane.engines.torch.ranks.leader import Leader
from dataplane.engines.torch.ranks.processes import shut_down, start_processes

RANK = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
"""A process that ends as soon as its socket is shut down."""


@pytest.fixture
def exited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where this process would end. Ranks are `RANK`."""

    def start(_: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            return ours, subprocess.Popen([sys.executable, "-c", RANK, str(number)], pass_fds=(number,))

    event = threading.Event()
    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(os, "_exit", lambda status: event.set())
    return event


def test_ranks_that_are_ended_do_not_end_this_process(exited: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they end before anything else is done after their sockets were shut down."""
    before = set(threading.enumerate())
    others = start_processes(2)
    watches = set(threading.enumerate()) - before

    def until_ended(connections: Iterable[socket.socket]) -> None:
        shut_down(connections)
        for watch in watches:
            watch.join()

    monkeypatch.setattr(processes, "shut_down", until_ended)
    leader = Leader(Rank(index=0, count=3, collectives=Unconnected()), others.connections, others.end, exports=False)
    leader.close()
    assert not exited.is_set()
    assert all(connection.fileno() == -1 for connection in others.connections)


def test_a_rank_that_ends_by_itself_ends_this_process(exited: threading.Event) -> None:
    others = start_processes(1)
    with others.connections[0] as connection:
        connection.sendall(b".")
        assert exited.wait(60)
