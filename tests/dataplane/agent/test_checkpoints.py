"""Checkpoints from a registry: an agent fetches them, shows failures, tries again, and serves what a folder would."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from dataplane.agent import hosted_instances
from dataplane.agent.hosted_instances import HostedInstances
from dataplane.agent.tokenization import TokenizerCache, load_tokenizer
from dataplane.checkpoints import local as checkpoints
from dataplane.checkpoints.local import PROGRESS_EVERY_S, ProgressLog, Sources, in_own_thread, local_checkpoint
from dataplane.checkpoints.sources import FetchError, FetchRules, Progress
from dataplane.protocol.errors import ModelLoadError
from dataplane.worker.frames import Command, Load
from tests.dataplane.agent.test_tokenization import write_tokenizer
from tests.dataplane.agent.test_torch_node import body, checkpoint, instances, torch_settings
from tests.dataplane.registry import Registry
from tests.dataplane.replay_node import Node, desired, instance, running_node, settings, workers
from tests.dataplane.streams import read, token_ids
from tests.event_loop import PATIENCE_S, asynchronous, until


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / "there").mkdir()
    write_tokenizer(tmp_path / "there", None)
    (tmp_path / "there" / "model.safetensors").write_bytes(bytes(300_000))
    started = Registry.of(tmp_path / "there")
    yield started
    started.close()


def here(folder: Path) -> Sources:
    """Registries on this machine."""
    return Sources(folder=folder, rules=FetchRules(private_hosts=("127.0.0.1",)))


def test_a_path_outside_of_the_roots_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "models" / "a", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(outside)
    sources = Sources(folder=tmp_path, roots=(tmp_path / "models",))
    assert local_checkpoint(str(inside), sources) == inside
    for path in (
        outside,
        tmp_path / "models" / "link",
        tmp_path / "models2",
        "/",
    ):
        with pytest.raises(ModelLoadError, match="checkpoint_roots"):
            local_checkpoint(str(path), sources)


@asynchronous
async def test_a_node_reports_why_it_does_not_host_a_model(registry: Registry, tmp_path: Path) -> None:
    async with running_node(settings(checkpoints_dir=tmp_path, checkpoint_roots=(tmp_path,))) as node:
        node.agent.apply(desired(1, instance(path=registry.url)))
        await node.until(lambda: node.agent.reports()[0].state == "failed")
        assert "127.0.0.1 is no public address" in str(error_of(node))
        node.agent.apply(desired(2, instance("i2", path="/etc")))
        await node.until(lambda: node.agent.reports()[0].state == "failed")
        assert "checkpoint_roots" in str(error_of(node))
    assert registry.requests == []


def error_of(node: Node) -> str | None:
    return node.agent.reports()[0].error


@pytest.mark.slow
def test_a_remote_checkpoint_serves_the_tokens_of_its_folder(tmp_path: Path) -> None:
    local = checkpoint(tmp_path / "there", "tide")
    registry = Registry.of(tmp_path / "there")
    remote = msgspec.structs.replace(local, path=registry.url)

    async def tokens_of(node: Node) -> list[int]:
        return token_ids(await read(node, body("same", 3)))

    async def scenario() -> None:
        async with running_node(
            torch_settings(1, checkpoints_dir=tmp_path / "here", private_hosts=("127.0.0.1",))
        ) as node:
            await node.hold(1, *instances([local]))
            expected = await tokens_of(node)
            await node.hold(2)
            assert registry.requests == []
            await node.hold(3, *instances([remote]))
            assert await tokens_of(node) == expected
            fetches = len(registry.requests)
            await node.hold(4, *instances([remote]))
            held = node.agent.workers[0].hosted.get("i-tide")
            assert held is not None
            assert held.desired.model == remote
            assert Path(held.folder).parent == tmp_path / "here"
            assert len(registry.requests) == fetches

    try:
        asyncio.run(scenario())
    finally:
        registry.close()


@asynchronous
async def test_a_failed_fetch_is_shown_and_tried_again(registry: Registry, tmp_path: Path) -> None:
    registry.answers = [404]
    async with running_node(settings(checkpoints_dir=tmp_path / "here", private_hosts=("127.0.0.1",))) as node:
        node.agent.apply(desired(1, instance(path=registry.url)))
        await node.until(lambda: node.states() == {"i1": "failed"})
        assert error_of(node) == f"{registry.url}manifest.json answers 404"
        await node.until(lambda: node.states() == {"i1": "ready"})
        assert error_of(node) is None


@asynchronous
async def test_workers_that_need_the_same_checkpoint_fetch_it_once(registry: Registry, tmp_path: Path) -> None:
    async with running_node(
        settings(slots=workers(1, 1), checkpoints_dir=tmp_path / "here", private_hosts=("127.0.0.1",))
    ) as node:
        await node.hold(1, instance("i1", path=registry.url), instance("i2", slot=1, path=registry.url))
        held = [node.agent.workers[index].hosted.get(f"i{index + 1}") for index in range(2)]
        assert len({one.folder for one in held if one}) == 1
    assert len(registry.asked("tokenizer.json")) == 1
    assert registry.asked("model.safetensors") == [], "a replay needs no weights"
    assert len([path for path in (tmp_path / "here").iterdir() if path.is_dir()]) == 1


def test_what_is_fetched_without_weights_is_completed_where_they_are_needed(registry: Registry, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    folder = local_checkpoint(registry.url, here(tmp_path), lambda *progress: reported.append(progress), weights=False)
    assert not (folder / "model.safetensors").exists()
    assert reported[-1][0] == reported[-1][1] < 300_000
    assert local_checkpoint(registry.url, here(tmp_path)) == folder
    assert (folder / "model.safetensors").stat().st_size == 300_000
    assert len(registry.asked("tokenizer.json")) == 1


@asynchronous
async def test_the_state_shows_how_far_a_fetch_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def fetch(source: str, folder: Path, *, progress: Progress, **_: object) -> Path:
        progress(30, 100)
        begun.set()
        assert go_on.wait(60)
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(checkpoints, "fetch_checkpoint", fetch)
    async with running_node(settings(checkpoints_dir=tmp_path, private_hosts=("127.0.0.1",))) as node:
        node.agent.apply(desired(1, instance(path="hf://org/tide")))
        await node.until(begun.is_set)
        (worker,) = (await node.client.get("/state")).json()["slots"]
        assert worker["fetches"] == {"i1": {"done_bytes": 30, "total_bytes": 100}}
        go_on.set()
        await node.until(lambda: node.states() == {"i1": "ready"})
        (worker,) = (await node.client.get("/state")).json()["slots"]
        assert worker["fetches"] == {}


def test_a_folder_stays_where_it_is() -> None:
    assert local_checkpoint("/models/tide", here(Path("/nowhere"))) == Path("/models/tide")


def test_a_source_has_one_readable_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoints, "fetch_checkpoint", lambda source, folder, **_: folder)
    sources = ["https://a.org/m/", "https://a.org/m", "https://a.org-m", "hf://org/m", "hf://org/m@1"]
    folders = [local_checkpoint(source, here(tmp_path)) for source in sources]
    assert folders[0] == folders[1]
    assert len(set(folders)) == len(sources) - 1
    assert all(folder.parent == tmp_path for folder in folders)
    assert folders[3].name.startswith("org-m-")
    assert len(local_checkpoint("https://a.org/" + "m" * 4000, here(tmp_path)).name) < 100


def test_whatever_goes_wrong_is_a_failed_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise RuntimeError("no such token")

    monkeypatch.setattr(checkpoints, "fetch_checkpoint", fail)
    with pytest.raises(FetchError, match=r"hf://org/m cannot be fetched: .*no such token"):
        local_checkpoint("hf://org/m", here(tmp_path))


def test_progress_is_logged_now_and_then() -> None:
    times_s = iter([0.0, 1.0, PROGRESS_EVERY_S, PROGRESS_EVERY_S + 1, 3 * PROGRESS_EVERY_S])
    with capture_logs() as logs:
        progress = ProgressLog("hf://org/m", lambda: True, now_s=lambda: next(times_s))
        for done in (10, 20, 30, 40):
            progress(done, 100)
    assert [line["done_bytes"] for line in logs] == [20, 40]


def test_a_fetch_that_nobody_wants_ends_and_the_next_goes_on(tmp_path: Path) -> None:
    weights = bytes(1_000_000)
    registry = Registry({"model.safetensors": weights})
    reported: list[int] = []
    progress = ProgressLog(registry.url, is_wanted=lambda: not reported)

    def tell(done_bytes: int, total_bytes: int) -> None:
        progress(done_bytes, total_bytes)
        reported.extend([done_bytes] if done_bytes else [])

    try:
        with pytest.raises(FetchError, match="is not wanted any longer"):
            local_checkpoint(registry.url, here(tmp_path), tell)
        assert 0 < reported[-1] < len(weights)
        folder = local_checkpoint(registry.url, here(tmp_path))
    finally:
        registry.close()
    assert (folder / "model.safetensors").read_bytes() == weights
    first, second = registry.asked("model.safetensors")
    assert first is None
    assert second is not None


@asynchronous
async def test_a_thread_of_its_own_gives_results_and_errors_and_may_be_left() -> None:
    go_on = threading.Event()
    assert await in_own_thread(lambda: 7) == 7
    with pytest.raises(FetchError, match="broken"):
        await in_own_thread(lambda: _raise(FetchError("broken")))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_own_thread(go_on.wait), 0.01)
    go_on.set()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("path", ["hf://../..", "https://x/..%2f", "/models/../etc", "/etc/\n/x"])
def test_a_source_that_leads_elsewhere_is_refused_before_it_is_opened(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelLoadError, match="is no source of a model"):
        local_checkpoint(path, here(tmp_path))
    assert list(tmp_path.iterdir()) == []


@asynchronous
async def test_an_instance_that_is_wanted_again_is_loaded_only_when_its_checkpoint_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one that drains meanwhile lets the worker's next loads begin."""
    sent, is_there = list[Command](), threading.Event()

    def fetch(*_: object, **__: object) -> Path:
        assert is_there.wait(PATIENCE_S)
        return Path("/models/a")

    async def no_lines(_: str) -> frozenset[int]:
        return frozenset()

    monkeypatch.setattr(hosted_instances, "local_checkpoint", fetch)
    monkeypatch.setattr(hosted_instances, "read_ahead", lambda _: None)
    hosted = HostedInstances(
        "replay",
        TokenizerCache("replay", load_tokenizer, no_lines),
        worker_gpus=1,
        sources=Sources(folder=tmp_path),
        load_retry_s=PATIENCE_S,
        refusal=lambda _: None,
        in_use=lambda _: False,
        on_change=lambda _: None,
    )
    ours, other = [instance(name, name=name, path=f"hf://x/{name}") for name in ("ours", "other")]
    hosted.worker_ready(sent.append)
    is_there.set()
    hosted.follow([ours, other])
    await until(lambda: len(sent) == 2)
    for load in sent:
        assert isinstance(load, Load)
        hosted.loaded(load.instance_id, load.serial)
    hosted.follow([msgspec.structs.replace(ours, draining=True), other])
    hosted.settle("ours")
    is_there.clear()
    hosted.follow([ours, other])
    hosted.follow([ours, msgspec.structs.replace(other, draining=True)])
    hosted.settle("other")
    is_there.set()
    await until(lambda: isinstance(sent[-1], Load))
    assert [load.model.path for load in sent if isinstance(load, Load)] == 3 * ["/models/a"]
    hosted.close()
