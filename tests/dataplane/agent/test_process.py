"""The agent as a process: it joins, serves, and leaves nothing behind; and its settings."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from pydantic import ValidationError

from dataplane.agent.host_files import HostFiles
from dataplane.agent.process import CLOSING_S
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.agent.workers import configure
from dataplane.protocol.joining import Join
from dataplane.protocol.messages import Finished, Heartbeat, decode_lines
from tests.dataplane.replay_node import KEY, PROFILE, desired, generate, instance, settings, workers

RUN = (
    "from dataplane.agent.process import run_agent; from dataplane.agent.settings import AgentSettings;"
    " run_agent(AgentSettings())"
)


class Control(ThreadingHTTPServer):
    """A control plane that takes every node and wants one instance of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.join: Join | None = None
        self.heartbeat: Heartbeat | None = None
        self.wanted = desired(1, instance())
        self.waiting = 0
        self.answers = threading.Event()
        """Whether heartbeats are answered; the others wait, so many of them now."""
        self.answers.set()

    def ready(self) -> bool:
        return self.heartbeat is not None and [one.state for one in self.heartbeat.instances] == ["ready"]


class _Handler(BaseHTTPRequestHandler):
    server: Control

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/node/join":
            self.server.join = msgspec.json.decode(body, type=Join)
        else:
            self.server.heartbeat = msgspec.json.decode(body, type=Heartbeat)
            self.server.waiting += 1
            self.server.answers.wait()
            self.server.waiting -= 1
        answer = msgspec.json.encode(self.server.wanted)
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def control_plane() -> Iterator[Control]:
    with Control() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def agent_process(control: Control) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "TIDEPOOL_AGENT_NODE": "n1",
        "TIDEPOOL_AGENT_REGION": "us-east",
        "TIDEPOOL_AGENT_GPU_TYPE": "H800",
        "TIDEPOOL_AGENT_SLOTS": '[{"gpus": 1, "memory_bytes": 2097152}]',
        "TIDEPOOL_AGENT_ENGINE": "replay",
        "TIDEPOOL_AGENT_PROFILE": str(PROFILE),
        "TIDEPOOL_AGENT_REPLAY_SPEED": "20",
        "TIDEPOOL_AGENT_CONTROL_URL": f"http://127.0.0.1:{control.server_address[1]}",
        "TIDEPOOL_AGENT_NODE_KEY": KEY,
        "TIDEPOOL_AGENT_CONTROL_TIMEOUT_S": "60",
    }
    with subprocess.Popen([sys.executable, "-c", RUN], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_serves_and_leaves_no_worker_behind(number: signal.Signals) -> None:
    with control_plane() as control, agent_process(control) as process:
        wait_until(control.ready)
        assert control.join is not None
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=control.join.url, headers=headers, timeout=60) as client:
            body = msgspec.json.encode(generate(max_tokens=5))
            events = decode_lines(client.post("/generate", content=body).content)
            assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=5)
            (slot,) = client.get("/state").json()["slots"]
        assert is_running(slot["pid"])
        process.send_signal(number)
        status = process.wait(60)
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        wait_until(lambda: not is_running(slot["pid"]))


def test_sigterm_waits_for_successors_and_sigint_says_that_it_leaves() -> None:
    """While successors start elsewhere the node serves; when they have taken over, it ends without waiting."""
    with control_plane() as control, agent_process(control) as process:
        wait_until(control.ready)
        assert control.join is not None
        control.wanted = msgspec.structs.replace(control.wanted, handing_over=True)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: control.heartbeat is not None and control.heartbeat.leaving)
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=control.join.url, headers=headers, timeout=60) as client:
            answer = client.post("/generate", content=msgspec.json.encode(generate(max_tokens=5)))
            assert isinstance(decode_lines(answer.content)[-1], Finished), "it serves on"
        control.wanted = msgspec.structs.replace(control.wanted, handing_over=True, instances=())
        assert process.wait(60) == 0
    with control_plane() as control, agent_process(control) as process:
        wait_until(control.ready)
        control.wanted = msgspec.structs.replace(control.wanted, handing_over=True)
        control.answers.clear()
        wait_until(lambda: control.waiting > 0)
        process.send_signal(signal.SIGINT)
        time.sleep(2 * CLOSING_S)  # the control plane is slow
        control.answers.set()
        assert process.wait(60) == 0, "it waits for no successor"
        assert control.heartbeat is not None
        assert control.heartbeat.leaving
        assert [one.state for one in control.heartbeat.instances] == ["draining"]


def test_an_agent_with_nobody_to_hand_over_to_says_that_it_drains() -> None:
    with control_plane() as control, agent_process(control) as process:
        wait_until(control.ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert control.heartbeat is not None
        assert [one.state for one in control.heartbeat.instances] == ["draining"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"profile": None}, "profile must be set"),
        ({"host": "0.0.0.0"}, "advertise_url must be set"),
        ({"slots": ()}, "slots"),
        ({"kv_share": 1.0}, "kv_share"),
        ({"node_key": "short"}, "node_key"),
        ({"engine": "magic"}, "engine"),
        ({"slots": ({"gpus": 0, "memory_bytes": 2**30},)}, "gpus"),
        ({"slots": ({"memory_bytes": 2**30, "kind": "prefill"},)}, "slots: those of 1 GPUs have no decode slot"),
        ({"slots": ({"memory_bytes": 2**30, "kind": "fast"},)}, "kind"),
        (
            {"engine": "torch", "device": "cuda", "slots": ({"gpus": 2, "ranks": 1, "memory_bytes": 2**30},)},
            "slots.0.ranks must be 2, got 1 with gpus=2",
        ),
        (
            {"engine": "torch", "slots": ({"memory_bytes": 2**30}, {"gpus": 4, "ranks": 2, "memory_bytes": 2**30})},
            "slots.1.ranks must be 1 or 4, got 2 with gpus=4",
        ),
        (
            {
                "engine": "torch",
                "slots": (
                    {"gpus": 2, "ranks": 2, "memory_bytes": 2**30, "kind": "prefill"},
                    {"gpus": 2, "memory_bytes": 2**30, "kind": "decode"},
                ),
            },
            "slots: those of 2 GPUs have no decode slot",
        ),
        ({"slots": ({"gpus": 2, "ranks": 2, "memory_bytes": 2**30},)}, "slots.0.ranks must be 1, got 2 with gpus=2"),
        ({"prefill_ratio": 1.0}, "prefill_ratio"),
        ({"prefill_share": 0.0}, "prefill_share"),
        ({"quota_max_s": 0.0}, "quota_max_s"),
        ({"group_requests_max": 0}, "group_requests_max"),
        ({"order": "lifo"}, "order"),
        ({"slab_bytes": 1}, "slab_bytes"),
        ({"cache_bytes": 0}, "cache_bytes"),
        ({"host_kv_bytes": -1}, "host_kv_bytes"),
        ({"slab_bytes": 1000}, "slab_bytes"),
        ({"host_kv_bytes": 0, "split": True, "slots": ({"memory_bytes": 2**22},) * 2}, "host_kv_bytes"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        settings(**changes)


def test_an_agent_never_imports_torch() -> None:
    names = "dataplane.agent.process, dataplane.agent.tokenization, tokenizers"
    check = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_memory_is_shared_out() -> None:
    ours: AgentSettings = settings(kv_share=0.25)
    worker = WorkerSettings(gpus=4, memory_bytes=4 * 2**30)
    assert ours.weights_bytes(worker) == 3 * 2**30
    assert ours.kv_bytes(worker) == ours.host_kv_bytes_of(worker) == 2**30
    assert settings(host_kv_bytes=5).host_kv_bytes_of(worker) == 5
    assert settings(slots=(worker,), device="cuda").slots == (worker,), "a replay has no GPU to run on"
    assert KEY not in repr(ours)


@pytest.mark.parametrize(
    ("device", "gigabytes", "limits"),
    [
        ("cuda", 80, (256, 8192)),
        ("cuda", 70, (256, 8192)),
        ("cuda:1", 40, (128, 4096)),
        ("cuda", 24, (64, 2048)),
        ("cpu", 80, (32, 2048)),
    ],
)
def test_a_step_is_as_large_as_the_card_allows_or_as_it_is_set(
    device: str, gigabytes: int, limits: tuple[int, int]
) -> None:
    for gpus in (1, 4):  # the memory is that of a worker's GPUs together
        worker = WorkerSettings(gpus=gpus, memory_bytes=gpus * gigabytes * 10**9)
        assert settings(device=device).step_limits(worker) == limits
        assert settings(device=device, batch_max=7).step_limits(worker) == (7, limits[1])
        assert settings(device=device, prefill_tokens_max=100).step_limits(worker) == (limits[0], 100)


def test_a_slot_of_several_gpus_has_a_rank_for_each_and_its_memory_is_divided() -> None:
    planned = WorkerSettings(gpus=4, memory_bytes=4 * 2**30)
    tried = WorkerSettings(gpus=2, ranks=2, memory_bytes=4 * 2**30)
    cpu: AgentSettings = settings(engine="torch", profile=None, slots=(planned, tried), host_kv_bytes=2**21)
    cuda = settings(engine="torch", profile=None, device="cuda", slots=(planned,))
    assert (cpu.ranks_of(0), cpu.ranks_of(1), cuda.ranks_of(0), settings(slots=(planned,)).ranks_of(0)) == (1, 2, 4, 1)
    files = HostFiles(cpu, "boot")
    whole, divided = (configure(cpu, index, None, files, "torch") for index in range(2))
    assert (whole.ranks, whole.weights_bytes, whole.kv_bytes, whole.host_kv_bytes) == (1, 2**31, 2**31, 2**21)
    assert (divided.ranks, divided.weights_bytes, divided.kv_bytes, divided.host_kv_bytes) == (2, 2**30, 2**30, 2**20)


def kinds_and_groups(*slots: tuple[int, str], **changes: Any) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The first letters of the workers' kinds, and the groups."""
    made = tuple({"gpus": gpus, "memory_bytes": 2**30, "kind": kind} for gpus, kind in slots)
    ours = settings(slots=made, **changes)
    return "".join(kind[0] for kind in ours.kinds), ours.groups


@pytest.mark.parametrize(
    ("slots", "changes", "kinds", "groups"),
    [
        ([(1, "auto")] * 3, {}, "bbb", ((0,), (1,), (2,))),
        ([(1, "auto")] * 4, {"split": True}, "ppdd", ((0, 1, 2, 3),)),
        ([(1, "auto")] * 4, {"split": True, "prefill_ratio": 0.1}, "pddd", ((0, 1, 2, 3),)),
        ([(1, "auto")] * 3, {"split": True, "prefill_ratio": 0.9}, "ppd", ((0, 1, 2),)),
        ([(1, "auto")], {"split": True}, "b", ((0,),)),
        ([(1, "auto"), (2, "auto"), (1, "auto")], {"split": True}, "pbd", ((0, 2), (1,))),
        ([(1, "auto"), (1, "both"), (1, "auto")], {"split": True}, "pbd", ((0, 2), (1,))),
        ([(1, "decode"), (1, "auto")], {"split": True}, "dp", ((0, 1),)),
        ([(1, "prefill"), (1, "prefill"), (1, "auto")], {"split": True}, "ppd", ((0, 1, 2),)),
        ([(1, "decode"), (1, "prefill"), (1, "auto")], {}, "dpb", ((0, 1), (2,))),
        ([(1, "auto"), (2, "auto"), (1, "auto")], {"together": True}, "bbb", ((0, 2), (1,))),
        ([(1, "auto"), (1, "both")] * 2, {"split": True, "together": True}, "pbdb", ((0, 2), (1, 3))),
    ],
)
def test_workers_become_groups(slots: Any, changes: dict[str, Any], kinds: str, groups: Any) -> None:
    assert kinds_and_groups(*slots, **changes) == (kinds, groups)


def test_each_worker_has_its_own_gpus() -> None:
    slots = workers(1, 2, 1)
    given = settings(slots=slots, device="cuda")
    assert [list(given.gpus_of(worker)) for worker in range(3)] == [[0], [1, 2], [3]]
    assert given.worker_device == "cuda:0", "of those that the worker sees"
    assert list(settings(slots=slots, device="cuda:2").gpus_of(0)) == [2]
    on_cpu = settings(slots=slots, device="cpu")
    assert (list(on_cpu.gpus_of(2)), on_cpu.worker_device) == ([], "cpu")


def test_a_worker_beyond_the_visible_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    slots = workers(1, 1, 1)
    assert settings(slots=slots[:2], device="cuda", engine="torch").slots == slots[:2]
    with pytest.raises(ValueError, match=r"slots\.2: device cuda:2 is not among CUDA_VISIBLE_DEVICES=4,GPU-7"):
        settings(slots=slots, device="cuda", engine="torch")


def test_short_turns_are_short() -> None:
    assert settings(quota_max_s=0.01).turns.decode.quota_min_s == 0.01
