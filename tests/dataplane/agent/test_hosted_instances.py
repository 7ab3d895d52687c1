"""How the instances of a worker are loaded and fail, without a worker process."""

import threading
from pathlib import Path

import pytest

from dataplane.agent import hosted_instances
from dataplane.agent.hosted_instances import HostedInstances
from dataplane.agent.tokenization import Tokenizer, TokenizerCache, load_tokenizer
from dataplane.checkpoints.local import Sources
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import EngineKind
from dataplane.worker.frames import Command, Load, Unload
from tests.dataplane.replay_node import instance
from tests.event_loop import PATIENCE_S, asynchronous, until


async def no_variables(_: str) -> frozenset[str]:
    return frozenset()


def hosting(tokenizers: TokenizerCache | None = None, *, load_retry_s: float = PATIENCE_S) -> HostedInstances:
    return HostedInstances(
        "replay",
        tokenizers or TokenizerCache("replay", load_tokenizer, no_variables),
        worker_gpus=1,
        sources=Sources(folder=Path("/nowhere")),
        load_retry_s=load_retry_s,
        refusal=lambda _: None,
        in_use=lambda _: False,
        on_change=lambda _: None,
    )


def state_of(hosted: HostedInstances) -> tuple[str, str | None] | None:
    one = hosted.get("i1")
    return None if one is None else (one.state, one.error)


def answer_load(hosted: HostedInstances, sent: list[Command]) -> None:
    load = sent[-1]
    assert isinstance(load, Load), sent
    hosted.loaded(load.instance_id, load.serial)


@asynchronous
async def test_a_load_that_was_overtaken_and_fails_late_leaves_the_instance_as_it_is() -> None:
    may_fail, tries = threading.Event(), list[str]()

    def load(folder: str, engine: EngineKind) -> Tokenizer:
        tries.append(folder)
        if len(tries) == 1:
            assert may_fail.wait(PATIENCE_S)
            raise ModelLoadError("a read failed late")
        return load_tokenizer(folder, engine)

    sent = list[Command]()
    hosted = hosting(TokenizerCache("replay", load, no_variables))
    hosted.follow([instance()])
    await until(lambda: len(tries) == 1)
    hosted.fail_all("no process starts")
    hosted.worker_ready(sent.append)
    await until(lambda: len(sent) == 1)
    answer_load(hosted, sent)
    may_fail.set()
    await until(lambda: not hosted._loads)
    assert state_of(hosted) == ("ready", None)
    hosted.follow([])
    assert [type(command) for command in sent] == [Load, Unload]
    hosted.close()


@asynchronous
async def test_a_process_is_sent_nothing_before_the_latest_try_has_read_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that try might fail when the instance is ready, with what a former one had read."""
    sent, tries, may_fail = list[Command](), list[Path](), threading.Event()

    def read(folder: Path) -> None:
        tries.append(folder)
        if len(tries) == 2:
            assert may_fail.wait(PATIENCE_S)
            raise ModelLoadError("the folder is gone")

    monkeypatch.setattr(hosted_instances, "read_ahead", read)
    hosted = hosting(load_retry_s=0.0)
    hosted.follow([instance()])
    hosted.worker_ready(sent.append)
    await until(lambda: len(sent) == 1)
    assert isinstance(sent[0], Load)
    hosted.load_failed("i1", sent[0].serial, "no memory")
    assert len(sent) == 1, "the worker does not have it"
    await until(lambda: len(tries) == 2)
    hosted.worker_lost("with status 1")
    hosted.worker_ready(sent.append)
    assert len(sent) == 1
    may_fail.set()
    await until(lambda: len(tries) == 3)
    await until(lambda: len(sent) == 2)
    answer_load(hosted, sent)
    assert state_of(hosted) == ("ready", None)
    hosted.close()


@asynchronous
async def test_the_load_that_a_lost_process_was_at_is_to_blame_and_none_that_waited() -> None:
    """The first load waits for host memory, the second has begun, and the third waits for that one."""
    sent = list[Command]()
    hosted = hosting()
    hosted.follow(instance(f"i{number}", name=f"m{number}") for number in (1, 2, 3))
    for _ in range(2):
        hosted.worker_ready(sent.append)
        await until(lambda: len(sent) == 3)
        serials = {load.instance_id: load.serial for load in sent if isinstance(load, Load)}
        hosted.load_stage("i1", serials["i1"], begun=True)
        hosted.load_stage("i1", serials["i1"], begun=False)
        hosted.load_stage("i2", serials["i2"], begun=True)
        hosted.load_stage("i3", serials["i3"] - 1, begun=True)  # of another process
        hosted.worker_lost("with status -9")
        sent.clear()
    states = {name: one.state for name in serials if (one := hosted.get(name)) is not None}
    assert states == {"i1": "loading", "i2": "failed", "i3": "loading"}
    hosted.close()


@asynchronous
async def test_an_instance_that_failed_after_its_load_is_loaded_anew_later() -> None:
    sent = list[Command]()
    hosted = hosting(load_retry_s=0.0)
    hosted.follow([instance()])
    hosted.worker_ready(sent.append)
    await until(lambda: len(sent) == 1)
    answer_load(hosted, sent)
    assert isinstance(sent[0], Load)
    hosted.load_failed("i1", sent[0].serial, "its weights cannot be read")
    assert state_of(hosted) == ("failed", "its weights cannot be read")
    await until(lambda: isinstance(sent[-1], Load) and sent[-1] != sent[0])
    hosted.load_failed("i1", sent[0].serial, "an answer to the former load")
    assert state_of(hosted) == ("loading", None)
    answer_load(hosted, sent)
    assert state_of(hosted) == ("ready", None)
    hosted.close()


@asynchronous
async def test_no_load_is_to_blame_for_the_loss_of_another_host() -> None:
    sent = list[Command]()
    hosted = hosting()
    hosted.follow([instance()])
    for host_gone in (True, True, False, True):
        hosted.worker_ready(sent.append)
        await until(lambda: len(sent) == 1)
        assert isinstance(sent[0], Load)
        hosted.load_stage("i1", sent[0].serial, begun=True)
        hosted.worker_lost("as host 1 was lost", host_gone=host_gone)
        sent.clear()
    assert state_of(hosted) == ("loading", None)
    hosted.close()
