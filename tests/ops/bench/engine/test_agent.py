"""What a benchmark notices of the agent that it started, whose place other programs take here."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dataplane.protocol.messages import DesiredInstances
from ops.bench.engine import agent
from ops.bench.engine.agent import NodeProcess, measure, node_process
from tests.event_loop import asynchronous

LISTENS = """#!{python}
import json, os, socket, time
from urllib.request import Request, urlopen

def report(state, switches=0):
    instance = dict(instance_id="i", model="m", slot=0, state=state)
    beat = dict(node="n1", boot_id="b", generation=1, instances=[instance], switches_total=switches)
    urlopen(Request(os.environ["TIDEPOOL_AGENT_CONTROL_URL"] + "/node/heartbeat", json.dumps(beat).encode())).read()

socket.create_server(("127.0.0.1", int(os.environ["TIDEPOOL_AGENT_PORT"]))).accept()
"""
Start = Callable[[str], AbstractContextManager[NodeProcess]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a program that goes on so after it was connected to."""

    def started(goes_on: str) -> AbstractContextManager[NodeProcess]:
        program = tmp_path / "program"
        program.write_text(LISTENS.format(python=sys.executable) + goes_on)
        program.chmod(0o755)
        return node_process(DesiredInstances(generation=1, instances=()), {}, python=str(program), ready_max_s=30.0)

    return started


@pytest.mark.parametrize(
    ("goes_on", "message"),
    [
        ("os._exit(3)", "the agent ended with status 3"),
        ("os.kill(os.getpid(), 9)", "the agent ended with status -9"),
        ("report('failed'); time.sleep(60)", "an instance failed: .*boot_id"),
    ],
)
def test_an_agent_that_ends_and_an_instance_that_fails_are_told_apart(start: Start, goes_on: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message), start(goes_on):
        pass


@asynchronous
async def test_a_window_that_is_too_short_to_measure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_agent_cpu_s", lambda _: 1.25)
    with pytest.raises(RuntimeError, match="a window of 0 s had 0 tokens and 0 CPU seconds of the agent"):
        await measure(0, 0, wire="lines", workers=0, sequences=0, windows=1, window_s=0.0)


def test_what_does_not_happen_in_time_is_named(start: Start) -> None:
    with (
        start("report('ready'); time.sleep(60)") as node,
        pytest.raises(RuntimeError, match=r"no rain within 0 s: Heart"),
    ):
        node.wait_for(lambda: False, "no rain", 0.0)


def test_a_fresh_heartbeat_was_written_after_it_was_asked_for(start: Start) -> None:
    with start("for number in range(1, 6000): report('ready', number); time.sleep(0.01)") as node:
        for _ in range(3):
            before = len(node.control.received_s)
            assert node.fresh_heartbeat().switches_total >= before + 2
