"""Several API processes on one port: their metrics as one, and real processes under one supervisor."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.api import process_group
from controlplane.api.app import serve
from controlplane.api.process_group import GroupMember, bound_sockets, merged
from controlplane.errors import InvalidValueError
from controlplane.settings import Settings
from controlplane.store.tables import Role
from controlplane.store.tenants import Tenant, put_tenant
from ops.local.ports import free_port
from tests.controlplane.world import NODE_KEY, PATIENCE_S, FakeAgent, World, served, until

PROCESSES = 3
A = '# HELP a_total What "a" is.\n# TYPE a_total counter\n'
FIRST = f'{A}a_total{{model="x y"}} 1.0\n# HELP b B\n# TYPE b gauge\nb 2.0\n'.encode()
SECOND = f'# HELP c C\n# TYPE c gauge\nc 5.0\n{A}a_total{{model="z"}} 3.0\n'.encode()


def test_metrics_of_several_processes_are_told_apart_by_a_label() -> None:
    families = {each.name: each for each in text_string_to_metric_families(merged({"0": FIRST, "1": SECOND}).decode())}
    assert {name: each.type for name, each in families.items()} == {"a": "counter", "b": "gauge", "c": "gauge"}
    assert [(each.labels, each.value) for each in families["a"].samples] == [
        ({"process": "0", "model": "x y"}, 1.0),
        ({"process": "1", "model": "z"}, 3.0),
    ]
    assert [(each.labels, each.value) for each in families["b"].samples] == [({"process": "0"}, 2.0)]
    assert families["a"].documentation == 'What "a" is.'


def test_a_label_may_hold_what_else_ends_a_line() -> None:
    odd = 'a_total{model="x\u2028y"} 1.0'
    assert odd.replace("{", '{process="0",') in merged({"0": f"{A}{odd}\n".encode()}).decode().split("\n")


def test_a_port_is_shared_only_with_those_who_share_it() -> None:
    [first] = bound_sockets("127.0.0.1", 0, shared=True)
    port = first.getsockname()[1]
    with first, bound_sockets("127.0.0.1", port, shared=True)[0]:
        first.listen()
        named = f"TIDEPOOL_PORT: cannot listen at 127.0.0.1, port {port}: Address already in use"
        with pytest.raises(InvalidValueError, match=named):
            bound_sockets("127.0.0.1", port, shared=False)


def test_a_process_that_starts_gets_no_connections(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait until it has started, while others could answer them."""
    given: list[socket.socket] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: given.extend(sockets))
    serve(settings.model_copy(update={"host": "127.0.0.1", "port": 0}), GroupMember(folder=Path(), number=0))
    assert [one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in given] == [0]
    for one in given:
        one.close()


def test_a_system_that_cannot_share_a_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(process_group.socket, "SO_REUSEPORT")
    with pytest.raises(InvalidValueError, match="api_processes: this system cannot share a port"):
        bound_sockets("127.0.0.1", 0, shared=True)


@dataclass(frozen=True)
class Group:
    """A running `tidepool api --processes N`, and a node behind it."""

    url: str
    parent: subprocess.Popen[bytes]
    agent: FakeAgent
    log: Path

    def chat(self, key: str) -> httpx.Response:
        """Ask on a connection of its own."""
        body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text)
        return [(each.labels, each.value) for family in families for each in family.samples if each.name == name]

    def children(self) -> set[int]:
        """Ids of the processes that serve."""
        found = Path(f"/proc/{self.parent.pid}/task").glob("*/children")
        pids = {int(pid) for each in found for pid in read(each).split()}
        return {pid for pid in pids if b"--group" in read(Path(f"/proc/{pid}/cmdline"))}


def read(file: Path) -> bytes:
    """What the kernel says of a process; nothing of one that has just ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return file.read_bytes()
    return b""


@contextmanager
def group_of(world: World, folder: Path, **changes: Any) -> Iterator[Group]:
    settings, agent, log = world.settings, FakeAgent(), folder / "api.log"
    port = free_port()
    environment = {
        "TIDEPOOL_DATABASE_URL": settings.database_url.get_secret_value(),
        "TIDEPOOL_REDIS_URL": settings.redis_url.get_secret_value(),
        "TIDEPOOL_HOME": str(folder),
        "TIDEPOOL_PORT": str(port),
        "TIDEPOOL_NODE_KEY": NODE_KEY,
        "TIDEPOOL_HEARTBEAT_STALE_S": "600",
        "TIDEPOOL_LIMIT_TIMEOUT_S": str(PATIENCE_S),
        **{f"TIDEPOOL_{name.upper()}": str(value) for name, value in changes.items()},
    }
    command = (sys.executable, "-m", "ops.cli.main", "api", "--processes", str(PROCESSES))
    world.expect_no_loops()
    with ExitStack() as stack:
        agent.url = stack.enter_context(served(agent.app))
        world.serve("n0", agent.url)
        output = stack.enter_context(log.open("wb"))
        parent = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        try:
            until(lambda: b"all processes listen" in log.read_bytes() or parent.poll() is not None)
            assert parent.poll() is None, log.read_text()
            yield Group(f"http://127.0.0.1:{port}", parent, agent, log)
        finally:
            if parent.poll() is None:
                parent.send_signal(signal.SIGTERM)
            parent.wait(PATIENCE_S)


def test_limits_hold_for_all_processes_together(world: World, tmp_path: Path) -> None:
    per_minute, at_once, asked = 12, 4, 40
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="by-minute", requests_per_minute=per_minute))
        put_tenant(session, Tenant(name="at-once", concurrent_max=at_once))
    by_minute, together = (world.key(tenant=tenant) for tenant in ("by-minute", "at-once"))

    with group_of(world, tmp_path) as group, ThreadPoolExecutor(asked) as threads:
        began_s = time.monotonic()
        statuses = Counter(answer.status_code for answer in threads.map(group.chat, [by_minute] * asked))
        refilled = (time.monotonic() - began_s) * per_minute / 60
        assert per_minute <= statuses[200] <= per_minute + refilled
        assert statuses[200] + statuses[429] == asked

        group.agent.then = "held"
        answers = [threads.submit(group.chat, together) for _ in range(asked)]
        until(lambda: sum(answer.done() for answer in answers) == asked - at_once)
        until(lambda: sum(value for _, value in group.samples("tidepool_streams")) == at_once)
        group.agent.freed.set()
        assert Counter(answer.result().status_code for answer in answers) == {200: at_once, 429: asked - at_once}

        served = statuses[200] + at_once  # each is counted a little after its end
        until(lambda: sum(value for _, value in group.samples("tidepool_requests_total")) == served)
        assert {labels["process"] for labels, _ in group.samples("tidepool_streams")} == {"0", "1", "2"}
        refusing = {labels["process"] for labels, count in group.samples("tidepool_limit_refusals_total") if count}
        assert len(refusing) > 1, "one process alone was asked"
        viewer = {"Authorization": f"Bearer {world.key(Role.VIEWER)}"}
        live = httpx.get(f"{group.url}/admin/status/live", headers=viewer, timeout=PATIENCE_S).json()
        assert [(tier["tier"], tier["answers"]) for tier in live["objectives"]] == [("IW-N", served)]


def test_a_process_that_dies_is_started_again_and_all_end_when_their_streams_have(world: World, tmp_path: Path) -> None:
    key = world.key()
    with group_of(world, tmp_path) as group, ThreadPoolExecutor(1) as threads:
        before = group.children()
        assert len(before) == PROCESSES
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(group.children() - before) == 1 and b"is up again" in group.log.read_bytes())
        assert group.chat(key).status_code == 200

        group.agent.then = "held"
        answer = threads.submit(group.chat, key)
        until(lambda: sum(value for _, value in group.samples("tidepool_streams")) == 1)
        group.parent.send_signal(signal.SIGTERM)
        until(lambda: len(group.children()) == 1)
        group.agent.freed.set()
        assert answer.result().status_code == 200
        assert group.parent.wait(PATIENCE_S) == 0


def test_a_process_that_hangs_is_replaced_since_it_would_get_connections_for_ever(world: World, tmp_path: Path) -> None:
    key = world.key()
    with group_of(world, tmp_path, api_process_silence_max_s=4.0) as group:
        before = group.children()
        hung = min(before)
        os.kill(hung, signal.SIGSTOP)
        until(lambda: hung not in group.children() and b"is up again" in group.log.read_bytes())
        until(lambda: len(group.children()) == PROCESSES)  # one that is slow may be taken for one that hangs
        assert b"has not answered for 4 s" in group.log.read_bytes()
        assert [group.chat(key).status_code for _ in range(10)] == [200] * 10
