"""LoRA adapters that the instance of their base serves: what a node loads when and reports, and what streams see."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from dataplane.agent.hosted_adapters import with_leaving_adapters, with_shared_load
from dataplane.agent.hosted_instances import HostedInstances
from dataplane.protocol.messages import (
    BaseModel,
    DesiredInstance,
    Failed,
    Finished,
    Generate,
    InstanceReport,
    Sampling,
)
from dataplane.worker.frames import Command, Load
from tests.dataplane.replay_node import Node, desired, generate, instance, model, running_node, settings
from tests.dataplane.streams import read, token_ids

HOST = instance("i1")
LONG = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)


def adapter(name: str, *, path: str = "/adapters", weights_bytes: int = 10, host: str = "i1") -> DesiredInstance:
    base = BaseModel(name="tide", path="/nowhere", weights_bytes=1000)
    spec = model(name, path=path, weights_bytes=weights_bytes, base=base)
    return DesiredInstance(instance_id=f"{host}+{name}", slot=0, gpus=1, model=spec, host=host)


def asked(name: str, **changes: object) -> Generate:
    return generate(f"r-{name}", instance_id=f"i1+{name}", model=name, **changes)


def report(instance_id: str, host: str | None = None, **load: int) -> InstanceReport:
    values = {"kv_used_bytes": 10, "kv_capacity_bytes": 100, "remaining_tokens": 3, "running": 2, "waiting": 1}
    return InstanceReport(
        instance_id=instance_id, model=instance_id, slot=0, state="ready", host=host, **(values | load)
    )


def test_an_adapter_that_is_wanted_no_more_drains_while_its_host_stays() -> None:
    one, two = adapter("one"), adapter("two")
    drained = msgspec.structs.replace(one, draining=True)
    before = (HOST, one, two)
    assert with_leaving_adapters((HOST, two), before, is_hosted=lambda _: True) == (HOST, two, drained)
    assert with_leaving_adapters((HOST, two), (HOST, drained, two), is_hosted=lambda _: False) == (HOST, two)
    assert with_leaving_adapters((), before, is_hosted=lambda _: True) == ()
    assert with_leaving_adapters((HOST, one), (HOST, drained), is_hosted=lambda _: True) == (HOST, one)


def test_an_adapter_that_drains_runs_on_its_hosts_engine() -> None:
    """Or else its host could not move to another engine before the last answer."""
    moved = msgspec.structs.replace(HOST, model=model(engine="vllm"))
    (_, left) = with_leaving_adapters((moved,), (HOST, adapter("one")), is_hosted=lambda _: True)
    assert (left.model.engine, left.model.is_same(adapter("one").model)) == ("vllm", True)


def test_a_host_and_its_adapters_report_the_load_of_all() -> None:
    failed = msgspec.structs.replace(
        report("c", "a", kv_used_bytes=0, kv_capacity_bytes=0, remaining_tokens=0), state="failed"
    )
    shared = with_shared_load(
        (report("a"), report("b", "a", kv_used_bytes=30, kv_capacity_bytes=120), failed, report("x"))
    )
    assert [(one.kv_used_bytes, one.kv_capacity_bytes) for one in shared] == [(40, 130), (40, 130), (0, 0), (10, 100)]
    assert [one.remaining_tokens for one in shared] == [6, 6, 0, 3]
    assert [one.state for one in shared] == ["ready", "ready", "failed", "ready"]
    pooled = [msgspec.structs.replace(one, pooled=True) for one in (report("a"), report("b", "a"))]
    assert [one.kv_used_bytes for one in with_shared_load(pooled)] == [10, 10], "these are the whole slot's already"


def test_adapters_come_and_go_without_a_restart() -> None:
    async def scenario() -> None:
        async with running_node() as node:
            await node.hold(1, HOST)
            base = token_ids(await read(node, generate("before")))
            pid = node.agent.workers[0].pid
            await node.hold(2, HOST, adapter("one"), adapter("two"))
            answers = [token_ids(await read(node, asked(name))) for name in ("one", "two")]
            assert token_ids(await read(node, generate("after"))) == base
            assert len({tuple(tokens) for tokens in (base, *answers)}) == 3
            reports = {one.instance_id: one for one in node.agent.heartbeat().instances}
            assert [reports[name].host for name in ("i1", "i1+one", "i1+two")] == [None, "i1", "i1"]
            assert node.agent.heartbeat().pools == (), "one instance is no pool, whatever it serves"

            stream = asyncio.create_task(read(node, asked("one", sampling=LONG)))
            await node.until(lambda: node.in_flight() == 1)
            node.agent.apply(desired(3, HOST, adapter("two")))
            assert node.states()["i1+one"] == "draining"
            (refused,) = await read(node, generate("late", instance_id="i1+one", model="one"))
            assert isinstance(refused, Failed)
            assert refused.retryable
            assert (await stream)[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=400)
            await node.until(lambda: "i1+one" not in node.states())
            node.agent.apply(desired(3, HOST, adapter("two")))
            await node.hold(4, HOST, adapter("two"), adapter("one"))
            assert token_ids(await read(node, asked("one"))) == answers[0]
            assert (node.agent.workers[0].pid, node.agent.workers[0].restarts_total) == (pid, 0)

    asyncio.run(scenario())


def test_an_adapter_registered_anew_is_loaded_when_the_former_one_has_drained() -> None:
    """The worker knows both by one name, and would answer with the numbers that it has."""
    anew = msgspec.structs.replace(adapter("one"), instance_id="i1+one@2")

    async def scenario() -> None:
        async with running_node() as node:
            await node.hold(1, HOST, adapter("one"))
            stream = asyncio.create_task(read(node, asked("one", sampling=LONG)))
            await node.until(lambda: node.in_flight() == 1)
            node.agent.apply(desired(2, HOST, anew))
            waits_for = "the former adapter of its name drains"
            await node.until(lambda: [one.waits_for for one in node.agent.reports()] == [None, waits_for, None])
            assert node.states() == {"i1": "ready", "i1+one@2": "loading", "i1+one": "draining"}
            await node.until(lambda: node.states() == {"i1": "ready", "i1+one@2": "ready"})
            assert isinstance((await stream)[-1], Finished)

    asyncio.run(scenario())


def test_a_host_that_drains_waits_for_its_adapters_answers() -> None:
    async def scenario() -> None:
        async with running_node() as node:
            both = HOST, adapter("one")
            await node.hold(1, *both)
            stream = asyncio.create_task(read(node, asked("one", sampling=LONG)))
            await node.until(lambda: node.in_flight() == 1)
            node.agent.apply(desired(2, *(msgspec.structs.replace(one, draining=True) for one in both)))
            assert node.states() == {"i1": "draining", "i1+one": "draining"}
            shared = node.agent.heartbeat().instances
            assert isinstance((await stream)[-1], Finished)
            await node.until(lambda: node.states() == {})
            assert len({one.remaining_tokens for one in shared}) == 1

    asyncio.run(scenario())


def test_an_adapter_that_is_refused_fails_alone() -> None:
    async def scenario(node: Node) -> None:
        node.agent.apply(desired(1, HOST, adapter("one"), adapter("vast", weights_bytes=10_000)))
        await node.until(lambda: node.states() == {"i1": "ready", "i1+one": "ready", "i1+vast": "failed"})
        (error,) = [one.error for one in node.agent.reports() if one.state == "failed"]
        assert error is not None
        assert "vast" in error
        assert isinstance((await read(node, asked("one")))[-1], Finished)

    async def run() -> None:
        async with running_node(settings(adapters_bytes=100)) as node:
            await scenario(node)

    asyncio.run(run())


def test_adapters_are_back_after_a_worker_died() -> None:
    async def scenario() -> None:
        async with running_node() as node:
            await node.hold(1, HOST, adapter("one"))
            calm = token_ids(await read(node, asked("one", sampling=LONG)))
            again = generate("again", instance_id="i1+one", model="one", sampling=LONG)
            assert token_ids(await read(node, again, kill_at=3)) == calm
            await node.until(lambda: node.states() == {"i1": "ready", "i1+one": "ready"})
            assert node.agent.workers[0].restarts_total == 1

    asyncio.run(scenario())


def test_an_instance_that_is_lent_out_is_loaded_for_its_adapters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back with its lease's end, without another load of it."""
    loads: list[Load] = []
    ready = HostedInstances.worker_ready

    def noting(hosted: HostedInstances, send: Callable[[Command], None]) -> None:
        def note(command: Command) -> None:
            loads.extend([command] if isinstance(command, Load) else [])
            send(command)

        ready(hosted, note)

    async def scenario() -> None:
        async with running_node() as node:
            lent = msgspec.structs.replace(HOST, spot=True), msgspec.structs.replace(adapter("one"), draining=True)
            node.agent.apply(desired(1, *lent))
            await node.until(lambda: node.states() == {"i1": "spot"})
            await node.hold(2, HOST, adapter("one"))
            assert [(load.instance_id, load.model.adapters) for load in loads] == [
                ("i1", ("/adapters",)),
                ("i1+one", ()),
            ]

    monkeypatch.setattr(HostedInstances, "worker_ready", noting)
    asyncio.run(scenario())


@pytest.mark.parametrize("names", [("i1+one",), ("i1", "i1+one")])
def test_an_adapter_waits_for_its_host(names: tuple[str, ...]) -> None:
    """It alone would build the base, for a control plane that has not asked for that."""
    wanted = {"i1": instance("i1", path="/nowhere", weights_bytes=10**12), "i1+one": adapter("one")}

    async def scenario() -> None:
        async with running_node() as node:
            node.agent.apply(desired(1, *(wanted[name] for name in names)))
            await node.until(lambda: node.agent.reports()[-1].waits_for == "its base is loaded")
            if len(names) > 1:
                await node.until(lambda: node.states()["i1"] == "failed")
            assert node.states()["i1+one"] == "loading"

    asyncio.run(scenario())
