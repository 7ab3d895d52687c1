"""A caller is found by its connection, not by its port alone."""

import os
import socket
import sys

import pytest

from ops.faults.regional.callers import holds, sockets_between

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_the_process_at_the_other_end_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        called = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", called)) as caller:
            port = caller.getsockname()[1]
            sockets = sockets_between(port, called)
            assert len(sockets) == 1
            assert holds(os.getpid(), sockets)
            assert not holds(1, sockets)
            assert sockets_between(port, other.getsockname()[1]) == frozenset()


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert not holds(2**22 + 1, frozenset({"socket:[1]"}))
