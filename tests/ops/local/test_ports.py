"""A port is given once, to one process, before and while its server listens."""

import subprocess
import sys

import pytest

from ops.local import ports

HOLD = """
from ops.local import ports
ports._FIRST, ports._END = {first}, {first} + 2
print(ports.free_port(), flush=True)
input()
"""


def test_a_port_without_a_listener_is_not_given_to_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(port for port in range(14_000, 15_000, 2) if ports._is_free(port) and ports._is_free(port + 1))
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", HOLD.format(first=first)], stdin=pipe, stdout=pipe, text=True)
    try:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        monkeypatch.setattr(ports, "_FIRST", first)
        monkeypatch.setattr(ports, "_END", first + 2)
        assert {ports.free_port(), theirs} == {first, first + 1}
        with pytest.raises(OSError, match="no free port found between"):
            ports.free_port()
    finally:
        other.communicate("\n")
    assert ports.free_port() == theirs
