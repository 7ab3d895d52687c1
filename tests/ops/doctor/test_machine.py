"""Checks of a machine, on facts that are given."""

import socket

import pytest

from ops.doctor import machine
from ops.doctor.finding import Level

GIB = 2**30


@pytest.mark.parametrize(("version", "level"), [((3, 10), Level.FAILURE), ((3, 11), Level.OK), ((3, 13), Level.OK)])
def test_python(version: tuple[int, int], level: Level) -> None:
    found = machine.check_python(machine.Programs(python=version, python_text="Python", package="1"))
    assert found.level == level


def test_a_package_that_is_not_installed_has_no_version() -> None:
    facts = machine.Programs(python=(3, 11), python_text="Python 3.11.2", package=None)
    assert machine.check_package(facts).level == Level.WARNING


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [
        (GIB - 1, 2 * GIB, Level.FAILURE),
        (2 * GIB, 100 * GIB, Level.WARNING),
        (5 * GIB, 100 * GIB, Level.OK),
    ],
)
def test_disks(free: int, total: int, level: Level) -> None:
    assert machine.check_disk(machine.Space(folder="/data", free=free, total=total), "disk").level == level


@pytest.mark.parametrize(
    ("free", "is_node", "level"),
    [
        (None, True, Level.FAILURE),
        (None, False, Level.OK),
        (64 * 2**20, True, Level.WARNING),
        (64 * 2**20, False, Level.OK),
        (GIB, True, Level.OK),
    ],
)
def test_shared_memory(free: int | None, is_node: bool, level: Level) -> None:
    space = None if free is None else machine.Space(folder="/memory", free=free, total=free)
    assert machine.check_shared_memory(space, is_node=is_node).level == level


def test_gpus() -> None:
    gpus = machine.parse_gpus("NVIDIA H100, 81559, 570.1\nOdd, name, [N/A], 570.1\n")
    assert [(gpu.name, gpu.memory_mib) for gpu in gpus] == [("NVIDIA H100", 81559), ("Odd, name", 0)]
    assert machine.check_gpus(machine.Gpus(found=gpus), is_node=True).found.startswith("2: NVIDIA H100 (79.65 GiB)")
    assert machine.check_gpus(machine.Gpus(found=None), is_node=True).level == Level.WARNING
    assert machine.check_gpus(machine.Gpus(found=None), is_node=False).level == Level.OK
    broken = machine.Gpus(found=None, error="nvidia-smi: no driver")
    assert machine.check_gpus(broken, is_node=False).level == Level.FAILURE


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert machine.connect_error("127.0.0.1", port) is None
    closed = machine.connect_error("127.0.0.1", port)
    assert closed is not None
    assert "refused" in closed
    found = machine.check_port("127.0.0.1:1", closed, what="gateway", setting="TIDEPOOL_URL")
    assert (found.level, found.todo is not None) == (Level.FAILURE, True)
