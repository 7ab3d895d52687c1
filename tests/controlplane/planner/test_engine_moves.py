"""A move to an engine that cannot run the model, end to end: control plane and node are real, the workers are not."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
from sqlalchemy import select

from controlplane.planner.scale import scale
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import desired_of, observe
from controlplane.store.joining import join_node
from controlplane.store.keys import AuditEvent
from controlplane.store.tables import Instance, Model
from dataplane.agent.node import Agent
from dataplane.agent.tokenization import WordTokenizer
from dataplane.engines.interface import EngineStats
from dataplane.engines.vllm.version import TESTED
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import EngineChoice
from dataplane.worker.frames import Command, Configure, Load, Loaded, LoadFailed, Report, Stats
from tests.controlplane.world import World
from tests.dataplane.replay_node import install_vllm
from tests.dataplane.replay_node import settings as node_settings
from tests.event_loop import until

URL = "http://127.0.0.1:9"


class FakeWorker:
    """The agent's end of a worker that loads models, unless its engine is one of `broken`."""

    broken: frozenset[str] = frozenset()
    pid = 1

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._reports.put_nowait(Stats(stats=EngineStats()))

    @classmethod
    async def start(cls, configure: Configure, environment: Mapping[str, str]) -> Self:
        return cls(configure.engine)

    def send(self, command: Command) -> None:
        if isinstance(command, Load):
            name, serial = command.instance_id, command.serial
            fails = LoadFailed(instance_id=name, serial=serial, error=f"{self._engine} has no such kernel")
            self._reports.put_nowait(fails if self._engine in self.broken else Loaded(instance_id=name, serial=serial))

    def hang_up(self) -> None:
        self._reports.put_nowait(None)

    async def reports(self) -> AsyncIterator[Report]:
        while (report := await self._reports.get()) is not None:
            yield report

    async def stop(self) -> int:
        return 0


class Fleet:
    """A node of one slot, and the control plane that it follows. The test advances its time."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world, self.settings = world, settings
        self.agent = Agent(
            node_settings(engine="torch", profile=None, load_retry_s=600.0),
            boot_id="boot",
            start_worker=FakeWorker.start,
            load_tokenizer=lambda _folder, _engine: WordTokenizer(),
        )
        spec = (SlotSpec(gpus=1, memory_bytes=80 << 30),)
        with world.database.transaction() as session:
            join_node(session, Join(node="n1", region="us-east", gpu_type="H800", url=URL, slots=spec, engine="torch"))
            fleet.put_endpoint(session, model="tide", region="us-east", minimum=1, maximum=1)

    def choose(self, engine: EngineChoice) -> None:
        with self.world.database.transaction() as session:
            session.get_one(Model, "tide").engine = engine

    async def scale(self, *, later_s: float = 61.0) -> int:
        """Run scaling, and let the node follow its desired state; how many instances moved."""
        with self.world.database.transaction() as session:
            fleet.touch_node(session, "n1")
        self.world.report("n1", "none", region="us-east", url=URL)
        moved = scale(self.world.database, self.world.live, self.settings, now_s=time.time() + later_s).moved
        with self.world.database.transaction() as session:
            self.agent.apply(desired_of(session, "n1"))
        await until(self.settled)
        with self.world.database.transaction() as session:
            observe(session, self.agent.heartbeat())
        return moved

    def settled(self) -> bool:
        """Whether the node follows its desired state."""
        (worker,) = self.agent.workers
        states = {report.state for report in self.agent.reports()}
        return worker.pid is not None and not worker.replaced and states <= {"ready", "failed"}

    def instance(self) -> tuple[str, str, str]:
        """State, engine and reason of the one instance."""
        with self.world.database.transaction() as session:
            (row,) = session.scalars(select(Instance))
            return row.observed, row.engine, row.engine_reason or ""

    def audit(self) -> list[str]:
        with self.world.database.transaction() as session:
            rows = session.scalars(select(AuditEvent).where(AuditEvent.actor == "scale").order_by(AuditEvent.id))
            return [f"{row.action}: {(row.after or {})['engine']}" for row in rows]


@asynccontextmanager
async def running(world: World, settings: Settings) -> AsyncIterator[Fleet]:
    ours = Fleet(world, settings)
    task = asyncio.create_task(ours.agent.run())
    try:
        yield ours
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(("had", "wanted"), [("torch", "vllm"), ("vllm", "torch")])
def test_an_instance_that_fails_on_its_new_engine_goes_back_and_is_left_there(
    world: World,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    had: EngineChoice,
    wanted: EngineChoice,
) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    monkeypatch.setattr(FakeWorker, "broken", frozenset({wanted}))

    async def scenario() -> None:
        async with running(world, settings) as ours:
            ours.choose(had)
            assert await ours.scale() == 0
            assert ours.instance() == ("ready", had, "chosen for the model")
            ours.choose(wanted)
            assert await ours.scale() == 1
            assert ours.instance()[:2] == ("failed", wanted)
            assert ours.agent.workers[0].restarts_total == 0, "its process was replaced, it did not die"
            assert await ours.scale() == 0
            state, engine, reason = ours.instance()
            assert (state, engine) == ("ready", had)
            assert f"but {wanted} failed 1 x here, the last time on n1: {wanted} has no such kernel" in reason
            assert [await ours.scale(later_s=later_s) for later_s in (61, 500)] == [0, 0]
            assert ours.instance() == (state, engine, reason)
            moved, back = f"instance.move: {wanted}", [f"engine.fail: {wanted}", f"instance.move: {had}"]
            assert ours.audit() == [moved, *back]
            assert await ours.scale(later_s=700) == 1, "in the end it is tried again"
            assert await ours.scale(later_s=800) == 0
            assert await ours.scale(later_s=1100) == 0, "longer each time"
            assert "failed 2 x here" in ours.instance()[2]
            assert ours.audit() == [moved, *back] * 2

    asyncio.run(scenario())


def test_a_node_that_has_no_vllm_goes_on_with_torch(world: World, settings: Settings) -> None:
    async def scenario() -> None:
        async with running(world, settings) as ours:
            await ours.scale()
            ours.choose("vllm")
            assert [await ours.scale(), ours.instance()[0], await ours.scale()] == [1, "failed", 0]
            state, engine, reason = ours.instance()
            assert (state, engine) == ("ready", "torch")
            assert "on n1: vLLM is not installed on this node" in reason

    asyncio.run(scenario())
