"""A slot whose GPUs are of two hosts: what its agent says of the other host, and a follower that does what it is told.

Both hosts run the replay engine here; `tests/vllm/test_hosts.py` runs vLLM on both.
"""

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.agent import slot_hosts, workers
from dataplane.agent.heartbeats import join_message
from dataplane.agent.host_settings import HostSettings
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.agent.slot_hosts import SlotHosts
from dataplane.agent.worker_link import WorkerLink
from dataplane.checkpoints.digests import checkpoint_digest
from dataplane.checkpoints.local import Sources
from dataplane.checkpoints.sources import FetchError, Progress
from dataplane.engines.core.devices import HostSpan
from dataplane.engines.vllm.version import TESTED
from dataplane.follower import process
from dataplane.follower.process import Follower
from dataplane.protocol.errors import BadRequestError, ModelLoadError
from dataplane.protocol.host_states import HostState
from dataplane.protocol.messages import DesiredInstance
from dataplane.protocol.version import tidepool_version
from dataplane.worker.frames import LENGTH, Configure
from dataplane.worker.hosts import CheckOrder, HostOrders, HostReport, LaunchOrder
from tests.dataplane.agent.test_tokenization import write_tokenizer
from tests.dataplane.replay_node import (
    KEY,
    PROFILE,
    Node,
    OpenLink,
    desired,
    install_vllm,
    instance,
    model,
    running_node,
    settings,
)
from tests.event_loop import PATIENCE_S, asynchronous, until

HERE = "127.0.0.1"
LONG_S = 3600.0


@pytest.fixture
def _vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path / "site", monkeypatch)


def report(boot_id: str = "boot", **changes: Any) -> HostReport:
    values = {"slot": 0, "host": 1, "hostname": "second", "boot_id": boot_id, "version": tidepool_version()}
    return HostReport(**(values | {"engine_version": TESTED[0]} | changes))


def write_checkpoint(folder: Path, content: bytes = b"\x00\x00\x80\x3f") -> Path:
    """A checkpoint of one number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    write_tokenizer(folder, None)
    return folder


def held(folder: Path) -> DesiredInstance:
    return msgspec.structs.replace(instance(), gpus=2, model=model(path=str(folder)))


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_host_that_is_silent_starts_again_or_fails_is_named(tmp_path: Path) -> None:
    now_s = [0.0]
    hosts = SlotHosts(3, 2, silent_max_s=10.0, now_s=lambda: now_s[0])
    assert not hosts.complete
    assert hosts.missing is None, "it may still begin to report"
    assert hosts.waits_for("/tide") == "the followers of other hosts report: host 1"
    now_s[0] = 11.0
    assert hosts.missing == "host 1 of slot 3 is missing: its follower has not reported yet"
    assert hosts.receive(report(), HERE) == HostOrders()
    assert hosts.complete
    assert hosts.missing is None

    span = hosts.begin()
    assert (span.hosts, span.host, span.address, span.own_address) == (2, 0, HERE, HERE)
    configure = workers.configure(settings(), 0, None, workers.HostFiles(settings(), "boot"), "replay")
    folder = write_checkpoint(tmp_path / "tide")
    asked = held(folder).model
    checking = asyncio.create_task(hosts.check(asked.path, folder))
    check, digest = await next_check(hosts, None), checkpoint_digest(folder, lambda: True)
    assert hosts.waits_for("another") is None
    assert hosts.waits_for(asked.path) == "its checkpoint is fetched and read on all hosts: host 1 not done yet"
    hosts.receive(report(check=check.serial, digest=digest), HERE)
    await checking
    assert hosts.waits_for(asked.path) is None
    hosts.launch(configure, asked)
    launch = hosts.receive(report(), HERE).launch
    assert launch is not None
    assert (launch.model, launch.digest) == (asked, digest)
    assert hosts.loss is None
    with pytest.raises(BadRequestError, match=r"another follower reports as host 1 of slot 3: .* the same --rank"):
        hosts.receive(report("another boot"), HERE)
    assert hosts.loss is None
    now_s[0] += slot_hosts.TWIN_SEEN_MAX_S
    assert hosts.receive(report("another boot"), HERE).launch is None, "it would join ranks that have met already"
    assert hosts.loss == "host 1 was lost: its follower was started again"
    now_s[0] += slot_hosts.TWIN_SEEN_MAX_S
    hosts.receive(report(launch=launch.serial, ended="out of memory"), HERE)
    assert (hosts.loss, hosts.failure) == (None, "host 1 failed: out of memory")
    hosts.receive(report(launch="a former one", ended="out of memory"), HERE)
    assert (hosts.loss, hosts.failure) == (None, None)
    now_s[0] += 11.0
    assert hosts.loss == "host 1 was lost: its follower has not reported for 10 s"
    assert hosts.missing == "host 1 of slot 3 is missing: its follower has not reported for 11 s"
    hosts.end()
    assert hosts.receive(report(), HERE).launch is None


@pytest.mark.usefixtures("_vllm")
def test_followers_of_no_host_or_of_other_versions_are_refused() -> None:
    now_s = [0.0]
    hosts = SlotHosts(0, 2, silent_max_s=10.0, now_s=lambda: now_s[0])
    with pytest.raises(BadRequestError, match="slot 0 has 2 hosts: its ranks are 1 to 1"):
        hosts.receive(report(host=2), HERE)
    with pytest.raises(BadRequestError, match=r"vLLM 0\.1; the agent has .* and 0\.32\.0"):
        hosts.receive(report(engine_version="0.1"), HERE)
    older = msgspec.convert(
        {"slot": 0, "host": 1, "boot_id": "boot", "version": "0.1", "engine_version": "0.1"}, HostReport
    )
    with pytest.raises(BadRequestError, match=r"has Tidepool 0\.1 and vLLM 0\.1"):
        hosts.receive(older, HERE)
    assert not hosts.complete
    now_s[0] = 11.0
    assert hosts.missing is not None
    assert re.search(r"its follower was refused: host 1 of slot 0 has Tidepool .* and vLLM 0\.1; the", hosts.missing)
    (refused,) = hosts.states()
    assert (refused.connected, refused.hostname, refused.silent_s) == (False, None, None)
    assert "and vLLM 0.1; the agent has" in (refused.refusal or "")
    hosts.receive(report(), HERE)
    there = HostState(slot=0, host=1, connected=True, hostname="second", silent_s=0.0)
    assert hosts.states() == (there,)
    now_s[0] += 11.0
    assert hosts.missing == "host 1 of slot 0 is missing: its follower has not reported for 11 s"
    assert hosts.states() == (msgspec.structs.replace(there, connected=False, silent_s=11.0),)


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_operators_and_the_control_plane_see_the_hosts_of_a_slot() -> None:
    async with spanning_node() as node:
        (slot,) = join_message(node.agent, "http://n").slots
        assert (slot.gpus, slot.hosts, slot.memory_bytes) == (2, 2, 2**21), "of all hosts together"
        for connected in (False, True):
            if connected:
                await node.client.post("/hosts", content=msgspec.json.encode(report()))
            state = (await node.client.get("/state")).json()
            ((shown,),) = (slot["hosts"] for slot in state["slots"])
            assert state["heartbeat"]["hosts"] == [shown]
            assert (shown["slot"], shown["host"], shown["connected"]) == (0, 1, connected)


async def next_check(hosts: SlotHosts, before: CheckOrder | None) -> CheckOrder:
    await until(lambda: hosts.receive(report(), HERE).check not in (None, before))
    check = hosts.receive(report(), HERE).check
    assert check is not None
    return check


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_hosts_with_another_checkpoint_are_named(tmp_path: Path) -> None:
    hosts = SlotHosts(0, 2)
    folder, check = write_checkpoint(tmp_path / "ours"), None
    for changes, named in (
        ({"error": "no such file"}, "host 1 of slot 0: no such file"),
        ({"digest": "f" * 64}, f"host 1 of slot 0 has another checkpoint at hf://tide: .* is {'f' * 12}, here "),
    ):
        checking = asyncio.create_task(hosts.check("hf://tide", folder))
        check = await next_check(hosts, check)
        hosts.receive(report(check=check.serial, **changes), HERE)
        with pytest.raises(ModelLoadError, match=named):
            await checking


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_all_hosts_read_a_checkpoint_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def digest_of(_folder: Path, _is_wanted: object) -> str:
        assert asked.wait(PATIENCE_S)
        return "f" * 64

    monkeypatch.setattr(slot_hosts, "checkpoint_digest", digest_of)
    hosts = SlotHosts(0, 2)
    checking = asyncio.create_task(hosts.check("hf://tide", Path("/nowhere")))
    check = await next_check(hosts, None)
    asked.set()
    hosts.receive(report(check=check.serial, digest="f" * 64), HERE)
    await checking


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_no_host_reads_a_checkpoint_on_that_is_wanted_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = {name: threading.Event() for name in ("agent", "follower")}
    gave_up = {name: threading.Event() for name in reading}

    def read_by(name: str) -> Callable[[Path, Callable[[], bool]], str]:
        def read(_: Path, is_wanted: Callable[[], bool]) -> str:
            reading[name].set()
            while is_wanted():
                time.sleep(0.01)
            gave_up[name].set()
            raise ModelLoadError("it is not wanted any longer")

        return read

    monkeypatch.setattr(slot_hosts, "checkpoint_digest", read_by("agent"))
    monkeypatch.setattr(process, "checkpoint_digest", read_by("follower"))
    async with spanning_node() as node, following(node):
        node.agent.apply(desired(1, held(write_checkpoint(tmp_path / "tide"))))
        await until(lambda: all(each.is_set() for each in reading.values()))
        (report_,) = node.agent.reports()
        assert report_.waits_for == "its checkpoint is fetched and read on all hosts: host 1 not done yet"
        node.agent.apply(desired(2))
        await until(lambda: all(each.is_set() for each in gave_up.values()))


@pytest.mark.parametrize(
    ("slot", "changes", "named"),
    [
        ({"gpus": 3, "hosts": 2}, {}, "the 3 GPUs cannot be divided among 2"),
        ({"gpus": 2, "hosts": 2}, {"together": True}, "must be 1 where regroup, together or split is set"),
        ({"gpus": 2, "hosts": 2}, {"engine": "torch"}, "must be 1 for the engine torch; vllm takes 2"),
    ],
)
@pytest.mark.usefixtures("_vllm")
def test_slots_that_cannot_be_of_several_hosts(slot: dict[str, int], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"slots\.0\.hosts: {named}"):
        spanning(slot, **changes)


@pytest.mark.usefixtures("_vllm")
def test_an_agent_has_the_gpus_of_its_own_host_alone() -> None:
    one, four = {"gpus": 1}, {"gpus": 4, "hosts": 2}
    slots = tuple(WorkerSettings(memory_bytes=2**21, **each) for each in (one, four, one))
    given = spanning(four, slots=slots, device="cuda")
    assert [given.gpus_of(slot) for slot in range(3)] == [range(1), range(1, 3), range(3, 4)]
    assert given.ranks_of(1) == 4


def spanning(slot: Mapping[str, int], **changes: Any) -> AgentSettings:
    values = {"slots": (WorkerSettings(memory_bytes=2**21, **slot),), "engine": "vllm", "profile": None}
    return settings(**(values | {"load_retry_s": 3600.0, "worker_wait_max_s": 3600.0} | changes))


async def start_replay(asked: Configure, environment: Mapping[str, str]) -> WorkerLink:
    """A worker with the replay engine instead of vLLM."""
    replay = msgspec.structs.replace(asked, engine="replay", profile=str(PROFILE))
    return await WorkerLink.start(replay, environment)


@contextlib.asynccontextmanager
async def spanning_node() -> AsyncIterator[Node]:
    async with running_node(spanning({"gpus": 2, "hosts": 2}), start_worker=start_replay) as node:
        yield node


class FollowerWithRanks:
    """A running follower, and the processes that it starts."""

    def __init__(self) -> None:
        self.links: list[WorkerLink] = []
        self.spans: list[Any] = []

    async def start(self, asked: Configure, environment: Mapping[str, str]) -> WorkerLink:
        self.spans.append(asked.span)
        self.links.append(await start_replay(asked, environment))
        return self.links[-1]

    def have_ended(self) -> bool:
        return not any(is_running(link.pid) for link in self.links)


def is_running(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def following(node: Node, **changes: Any) -> AsyncIterator[FollowerWithRanks]:
    ranks = FollowerWithRanks()
    given = HostSettings(node_key=KEY, **changes)
    follower = Follower(given, head=str(node.client.base_url), slot=0, rank=1, start_ranks=ranks.start)
    task = asyncio.create_task(follower.run())
    try:
        yield ranks
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ranks.have_ended()


def error_of(node: Node) -> str:
    return " ".join(one.error or "" for one in node.agent.reports())


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_an_instance_is_on_all_hosts_or_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(workers, "SlotHosts", partial(SlotHosts, now_s=lambda: now_s[0]))
    async with spanning_node() as node:
        (worker,) = node.agent.workers
        node.agent.apply(desired(1, held(write_checkpoint(tmp_path / "tide"))))
        assert node.states() == {"i1": "loading"}, "the other host may still begin to report"
        now_s[0] += LONG_S
        await node.until(lambda: node.states() == {"i1": "failed"})
        assert error_of(node) == "host 1 of slot 0 is missing: its follower has not reported yet"
        assert worker.pid is None

        async with following(node) as first:
            await node.until(lambda: node.states() == {"i1": "ready"} and len(first.spans) == 1)
            (span,) = first.spans
            assert (span.hosts, span.host, span.own_address) == (2, 1, HERE)
            head = worker.pid
        now_s[0] += LONG_S
        await node.until(lambda: node.states() == {"i1": "failed"})
        assert "host 1 of slot 0 is missing: its follower has not reported for" in error_of(node)
        assert not is_running(head)

        async with following(node) as second:
            await node.until(lambda: node.states() == {"i1": "ready"} and len(second.links) == 1)
            head = worker.pid
            second.links[0].kill()
            await node.until(lambda: len(second.links) == 2 and node.states() == {"i1": "ready"})
            assert worker.pid != head, "the head's ranks have met those that are gone"

            node.agent.apply(desired(2))
            await until(second.have_ended)
            await node.hold(3, held(tmp_path / "tide"))
            await until(lambda: len(second.links) == 3)


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_checkpoint_that_a_follower_must_not_read_is_loaded_nowhere(tmp_path: Path) -> None:
    async with spanning_node() as node, following(node, checkpoint_roots=(tmp_path / "other",)) as ranks:
        folder = write_checkpoint(tmp_path / "tide")
        node.agent.apply(desired(1, held(folder)))
        await node.until(lambda: node.states() == {"i1": "failed"})
        assert error_of(node) == f"host 1 of slot 0: {folder} is in none of this node's checkpoint_roots"
        assert not ranks.links


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_host_that_comes_back_with_another_checkpoint_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spanning_node() as node:
        async with following(node) as first:
            await node.hold(1, held(write_checkpoint(tmp_path / "tide")))
            await until(lambda: len(first.links) == 1)
        monkeypatch.setattr(process, "checkpoint_digest", lambda *_: "f" * 64)
        async with following(node) as second:
            await node.until(lambda: node.states() == {"i1": "failed"})
            assert f"host 1 of slot 0 has another checkpoint at {tmp_path / 'tide'}" in error_of(node)
            assert not second.links


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_checkpoint_that_is_wanted_no_more_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, gave_up = threading.Event(), threading.Event()

    def fetch(path: str, sources: Sources, progress: Progress) -> Path:
        try:
            while path == str(tmp_path / "wrong"):
                progress(1, 2)
                fetched.set()
                time.sleep(0.01)
        except FetchError:
            gave_up.set()
            raise
        return Path(path)

    monkeypatch.setattr(process, "local_checkpoint", fetch)
    wrong, right = (write_checkpoint(tmp_path / name) for name in ("wrong", "right"))
    async with spanning_node() as node, following(node):
        node.agent.apply(desired(1, held(wrong)))
        await until(fetched.is_set)
        node.agent.apply(desired(2))
        await until(gave_up.is_set)
        await node.hold(3, held(right))
        fetched.clear()
        node.agent.apply(desired(4, held(wrong)))
        await until(fetched.is_set)
        await node.hold(5, msgspec.structs.replace(held(right), instance_id="i2"))


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_process_that_ends_as_a_follower_is_gone_is_no_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Configure]()

    async def start(asked: Configure, environment: Mapping[str, str]) -> WorkerLink:
        started.append(asked)
        return await start_replay(asked, environment)

    monkeypatch.setattr(SlotHosts, "complete", True)
    monkeypatch.setattr(SlotHosts, "begin", lambda _: HostSpan(hosts=2, host=0, address=HERE, port=1, own_address=HERE))
    monkeypatch.setattr(SlotHosts, "loss", "host 1 was lost: its follower was started again")
    async with running_node(spanning({"gpus": 2, "hosts": 2}), start_worker=start) as node:
        node.agent.apply(desired(1, held(write_checkpoint(tmp_path / "tide"))))
        await node.until(lambda: len(started) > workers.START_FAILURES_MAX + 1)
        assert node.states() == {"i1": "loading"}


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_follower_that_has_no_such_checkpoint_says_so() -> None:
    follower = Follower(HostSettings(node_key=KEY), head="http://127.0.0.1:1", slot=0, rank=1)
    given = workers.configure(settings(), 0, None, workers.HostFiles(settings(), "boot"), "replay")
    span = HostSpan(hosts=2, host=0, address=HERE, port=1, own_address=HERE)
    configure = msgspec.structs.replace(given, span=span)
    launch = LaunchOrder(serial="launch", configure=configure, model=model(), digest="f" * 64)
    await follower._obey(HostOrders(launch=launch))
    assert follower._report.ended == "it has no checkpoint at /nowhere with the digest ffffffffffff"


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_a_slot_of_several_hosts_serves_no_pooled_models_and_no_adapters(tmp_path: Path) -> None:
    async with spanning_node() as node:
        given = held(write_checkpoint(tmp_path / "tide"))
        adapter = msgspec.structs.replace(given.model, name="adapter", base=given.model)
        refused = [
            msgspec.structs.replace(given, instance_id="i1", gpus=0),
            msgspec.structs.replace(given, instance_id="i2", model=adapter),
        ]
        (worker,) = node.agent.workers
        error = "worker 0 is of 2 hosts, which serve dedicated models on vLLM alone"
        for generation, instances in enumerate((refused, refused[:1]), start=1):
            node.agent.apply(desired(generation, *instances))
            await node.until(lambda: set(node.states().values()) == {"failed"})
            assert error_of(node) == " ".join([error] * len(instances))
            assert worker.engine == "vllm", "its other hosts run nothing else"


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_ranks_whose_report_cannot_be_read_have_ended() -> None:
    follower = Follower(HostSettings(node_key=KEY), head="http://127.0.0.1:1", slot=0, rank=1)
    given = workers.configure(settings(), 0, None, workers.HostFiles(settings(), "boot"), "replay")
    link = await OpenLink.start(given, {})
    link.reader.feed_data(LENGTH.pack(2**32 - 1))
    await follower._watch(link)
    assert "the process of its ranks was ended: " in (follower._report.ended or "")
    assert not is_running(link.pid)


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_ranks_that_a_stopped_follower_was_ending_have_ended() -> None:
    """Their process is waited for though the first wait for it was cancelled."""
    follower = Follower(HostSettings(node_key=KEY), head="http://127.0.0.1:1", slot=0, rank=1)
    given = workers.configure(settings(), 0, None, workers.HostFiles(settings(), "boot"), "replay")
    link = follower._link = await start_replay(given, {})
    follower._ranks = asyncio.create_task(follower._watch(link))
    ending = asyncio.create_task(follower._end_ranks())
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    await follower._end_ranks()
    assert not is_running(link.pid)
    assert (follower._report.ended or "").startswith("the process of its ranks ended with status ")


@pytest.mark.usefixtures("_vllm")
@asynchronous
async def test_only_the_nodes_key_follows_it() -> None:
    async with spanning_node() as node:
        body = msgspec.json.encode(report())
        refused = await node.client.post("/hosts", content=body, headers={"authorization": "Bearer another-key"})
        assert refused.status_code == 401
        assert "TIDEPOOL_AGENT_NODE_KEY must be the same on all hosts of a node" in refused.text
        other = await node.client.post("/hosts", content=msgspec.json.encode(report(slot=1)))
        assert other.status_code == 400
        assert "slot 1 of this node is not of several hosts" in other.text
