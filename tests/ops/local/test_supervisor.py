"""The supervisor with small programs as children: order, healing, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.local.processes import Child
from ops.local.supervisor import START_ATTEMPTS_MAX, Supervisor, SupervisorError
from tests.flows.waiting import wait_until

PYTHON = (sys.executable, "-I", "-S", "-c")
SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PARENT_OF_STUBBORN = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {STUBBORN!r}])"
TIMEOUT_S = 30.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def members(group: int) -> set[int]:
    """The living processes of a process group."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            found.add(int(stat.parent.name))
    return found


def child(folder: Path, name: str, code: str, **more: object) -> Child:
    given = {"name": name, "argv": (*PYTHON, code), "log": folder / f"{name}.log", "settled_s": 0.1, **more}
    return Child(**given)  # type: ignore[arg-type]


def test_children_start_after_what_they_need_and_stop_before_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    code = (
        "import signal, sys, time\n"
        "def note(word):\n"
        f"    open({str(journal)!r}, 'a').write(word + '\\n')\n"
        "def leave(*_):\n"
        "    note('stop ' + NAME)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "note('start ' + NAME)\n"
        "time.sleep(600)\n"
    )

    def noting(name: str, *after: str) -> Child:
        def ready() -> bool:
            return f"start {name}" in journal.read_text()

        return child(tmp_path, name, f"NAME = {name!r}\n{code}", after=after, ready=ready)

    with Supervisor([noting("api", "worker"), noting("worker", "base"), noting("base")]) as supervisor:
        assert set(supervisor.pids()) == {"api", "worker", "base"}
    lines = journal.read_text().split("\n")[:-1]
    assert lines == ["start base", "start worker", "start api", "stop api", "stop worker", "stop base"]
    assert supervisor.pids() == {}


@linux
def test_a_killed_child_comes_back_and_each_restart_is_one_line(tmp_path: Path) -> None:
    lines: list[str] = []
    with Supervisor([child(tmp_path, "one", SLEEP), child(tmp_path, "two", SLEEP)], report=lines.append) as supervisor:
        first = supervisor.pids()
        os.kill(first["one"], signal.SIGKILL)
        wait_until(lambda: supervisor.restarts()["one"] == 1)
        supervisor.wait_ready(TIMEOUT_S)
        second = supervisor.pids()
        assert second["one"] != first["one"]
        assert is_alive(second["one"])
        assert second["two"] == first["two"]
        assert supervisor.restarts() == {"one": 1, "two": 0}
    assert [line for line in lines if "restart 1" in line] == [
        f"one (pid {first['one']}) was ended by SIGKILL; restart 1 in 0.25 s"
    ]


def test_restarts_back_off(tmp_path: Path) -> None:
    lines: list[str] = []
    ready_once = iter([True])
    flaky = child(tmp_path, "flaky", "import time; time.sleep(0.3)", ready=lambda: next(ready_once, False))
    with Supervisor([flaky], report=lines.append) as supervisor:
        wait_until(lambda: supervisor.restarts()["flaky"] >= 2)
    delays = [line.split(" in ")[1] for line in lines if "restart" in line][:2]
    assert delays == ["0.25 s", "0.5 s"]


@linux
def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    log = tmp_path / "family.log"

    def ready() -> bool:
        return "up" in log.read_text()

    family = child(tmp_path, "family", PARENT_OF_STUBBORN, ready=ready)
    with Supervisor([family], report=lambda _: None) as supervisor:
        first = supervisor.pids()["family"]
        before = members(first)
        assert len(before) == 2
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: supervisor.restarts()["family"] == 1)
        wait_until(lambda: not members(first))
        supervisor.wait_ready(TIMEOUT_S)
        second = supervisor.pids()["family"]
    wait_until(lambda: not members(second))  # who was killed is there until init has reaped it


@linux
def test_a_child_that_ignores_its_stop_signal_is_killed_in_the_end(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "stubborn.log"
    stubborn = child(tmp_path, "stubborn", STUBBORN, stop_timeout_s=0.3, ready=lambda: "up" in log.read_text())
    with Supervisor([stubborn], report=lines.append) as supervisor:
        pid = supervisor.pids()["stubborn"]
    assert not is_alive(pid)
    assert any("did not stop within" in line for line in lines)


def test_a_child_that_answers_no_more_is_killed_and_started_again(tmp_path: Path) -> None:
    lines: list[str] = []
    hung: set[int] = set()
    supervisor: Supervisor

    def ready() -> bool:
        return not hung & set(supervisor.pids().values())

    given = [child(tmp_path, "one", SLEEP, ready=ready, silence_max_s=1.0), child(tmp_path, "two", SLEEP)]
    with (supervisor := Supervisor(given, report=lines.append)):
        first = supervisor.pids()
        wait_until(lambda: supervisor.restarts()["one"] == 0 and supervisor.pids() == first)
        hung.add(first["one"])
        wait_until(lambda: supervisor.restarts()["one"] == 1)
        supervisor.wait_ready(TIMEOUT_S)
        assert supervisor.pids()["two"] == first["two"]
    assert f"one (pid {first['one']}) has not answered for 1 s; killing it" in lines


@linux
def test_a_child_that_cannot_start_is_named_with_its_last_words_and_the_others_stop(tmp_path: Path) -> None:
    broken = child(
        tmp_path, "broken", "print('no such model'); raise SystemExit(3)", after=("good",), ready=lambda: False
    )
    supervisor = Supervisor([child(tmp_path, "good", SLEEP), broken], report=lambda _: None)
    with pytest.raises(SupervisorError, match=r"broken did not start in 3 attempts: it exited with code 3") as caught:
        supervisor.start()
    assert "no such model" in str(caught.value)
    assert supervisor.restarts()["broken"] == START_ATTEMPTS_MAX - 1
    assert supervisor.pids() == {}
    assert supervisor._thread is not None
    assert not supervisor._thread.is_alive()


def test_a_program_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    missing = child(tmp_path, "ghost", "", argv=("/nowhere/ghost",), ready=lambda: False)
    with pytest.raises(SupervisorError, match=r"cannot run /nowhere/ghost: \[Errno 2\] No such file"):
        Supervisor([missing], report=lambda _: None).start()


def test_a_child_that_never_gets_ready_tells_why(tmp_path: Path) -> None:
    def ready() -> bool:
        raise ConnectionRefusedError("port 1")

    slow = child(tmp_path, "slow", SLEEP, ready=ready, ready_timeout_s=0.5)
    with pytest.raises(SupervisorError, match=r"slow was not ready within 0.5 s \(ConnectionRefusedError: port 1\)"):
        Supervisor([slow]).start()


@pytest.mark.parametrize(
    ("after_one", "after_two", "message"),
    [(("two",), ("one",), "each other"), (("nobody",), (), "unknown"), ((), None, "share a name")],
)
def test_bad_sets_of_children_are_refused(
    tmp_path: Path, after_one: tuple[str, ...], after_two: tuple[str, ...] | None, message: str
) -> None:
    one = child(tmp_path, "one", SLEEP, after=after_one)
    two = one if after_two is None else child(tmp_path, "two", SLEEP, after=after_two)
    with pytest.raises(ValueError, match=message):
        Supervisor([one, two])


def test_a_log_over_its_limit_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("old words\n" * 2)
    with Supervisor([child(tmp_path, "one", f"print('new', flush=True); {SLEEP}", log_bytes_max=10)]):
        wait_until(lambda: (tmp_path / "one.log").read_text() == "new\n")
    assert (tmp_path / "one.log.1").read_text() == "old words\n" * 2


def test_a_child_gets_the_environment_it_was_given(tmp_path: Path) -> None:
    code = f"import os; print(os.environ['COLOUR'], os.environ.get('HOME'), flush=True); {SLEEP}"
    with Supervisor([child(tmp_path, "one", code, env={"COLOUR": "teal"})]):
        wait_until(lambda: (tmp_path / "one.log").read_text() == "teal None\n")


PROGRAM = """
import json, sys
from pathlib import Path
from ops.local.processes import Child
from ops.local.supervisor import Supervisor
folder, timeout_s, *codes = sys.argv[1:]
def ready(log, code):
    return None if "SIG_IGN" not in code else lambda: "up" in log.read_text()
logs = [Path(folder, f"c{i}.log") for i in range(len(codes))]
children = [
    Child(name=f"c{i}", argv=(sys.executable, "-I", "-S", "-c", code), log=logs[i],
          stop_timeout_s=float(timeout_s), ready=ready(logs[i], code))
    for i, code in enumerate(codes)
]
supervisor = Supervisor(children)
supervisor.run(lambda: print(json.dumps(list(supervisor.pids().values())), flush=True))
"""


def start_program(folder: Path, *codes: str, timeout_s: float = 0.4) -> tuple[subprocess.Popen[str], set[int]]:
    """A supervisor in a process of its own, and all processes of its children."""
    argv = [sys.executable, "-c", PROGRAM, str(folder), str(timeout_s), *codes]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = json.loads(program.stdout.readline())
    return program, {member for pid in pids for member in members(pid)} | children_of(program.pid)


def children_of(pid: int) -> set[int]:
    return {
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    }


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_program_stops_it_and_all_children(tmp_path: Path, number: signal.Signals) -> None:
    program, pids = start_program(tmp_path, SLEEP, STUBBORN, PARENT_OF_STUBBORN)
    assert len(pids) == 5
    program.send_signal(number)
    _, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0
    assert "c1" in errors
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])


@linux
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    program, pids = start_program(tmp_path, STUBBORN, timeout_s=600)
    while program.poll() is None:
        program.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    program.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])


@linux
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program, pids = start_program(tmp_path, SLEEP, STUBBORN, PARENT_OF_STUBBORN)
    assert len(pids) == 5
    program.kill()
    program.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])


def sweeper_of(program: int) -> int:
    return next(pid for pid in children_of(program) if b"sweeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


@linux
def test_a_killed_sweeper_is_replaced_and_the_new_one_knows_the_children(tmp_path: Path) -> None:
    program, pids = start_program(tmp_path, PARENT_OF_STUBBORN)
    os.kill(sweeper_of(program.pid), signal.SIGKILL)
    assert program.stderr is not None
    assert "another has taken over" in program.stderr.readline()
    pids |= children_of(program.pid)
    program.kill()
    program.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])


@linux
def test_children_follow_a_killed_supervisor_even_without_a_sweeper(tmp_path: Path) -> None:
    program, pids = start_program(tmp_path, SLEEP, SLEEP)
    program.send_signal(signal.SIGSTOP)
    os.kill(sweeper_of(program.pid), signal.SIGKILL)
    program.kill()
    program.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])
