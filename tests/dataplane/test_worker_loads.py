"""Loads beside work: a worker's loop goes on while models are prepared, one after the other, and loses no command."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dataplane.engine import EngineOutput, EngineStats
from dataplane.errors import ModelLoadError
from dataplane.frames import (
    AskStats,
    Cancel,
    Command,
    Load,
    Loaded,
    LoadFailed,
    Outputs,
    Release,
    Report,
    Stats,
    Unload,
)
from dataplane.messages import ModelSpec
from dataplane.worker import Worker
from tests.dataplane.replay_node import model


class GatedEngine:
    """An engine whose `prepare` waits until the test lets the model through, and that steps on when told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.working = False

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def prepare(self, spec: ModelSpec) -> None:
        self.calls.append(f"prepare {spec.name}")
        assert self.gate(spec.name).wait(30)
        if spec.name == "broken":
            raise ModelLoadError("no such checkpoint")

    def load(self, instance_id: str, spec: ModelSpec, *, gpus: int = 1) -> None:
        self.calls.append(f"load {instance_id} {spec.name}")

    def unload(self, instance_id: str) -> None:
        self.calls.append(f"unload {instance_id}")

    def cancel(self, request_id: str) -> None:
        self.calls.append(f"cancel {request_id}")

    def release(self, request_id: str) -> None:
        self.calls.append(f"release {request_id}")

    def has_work(self) -> bool:
        return self.working

    def step(self) -> list[EngineOutput]:
        return [EngineOutput(request_id="busy", token_ids=(1,))]

    def stats(self) -> EngineStats:
        return EngineStats()


class Bench:
    """A worker on a thread, and what it says."""

    def __init__(self) -> None:
        self.engine = GatedEngine()
        self.commands: queue.Queue[Any] = queue.Queue()
        self.reports: queue.Queue[Report] = queue.Queue()

    def tell(self, *commands: Command) -> None:
        for command in commands:
            self.commands.put(command)

    def hear(self, wanted: Callable[[Report], bool]) -> Report:
        """The next report that is wanted; those before it are dropped."""
        while True:
            report = self.reports.get(timeout=30)
            if wanted(report):
                return report

    def answer(self) -> Report:
        """The next answer to a load."""
        return self.hear(lambda report: isinstance(report, Loaded | LoadFailed))


@contextmanager
def running() -> Iterator[Bench]:
    bench = Bench()
    engine: Any = bench.engine
    thread = threading.Thread(target=Worker(engine, bench.commands, bench.reports.put).run)
    thread.start()
    try:
        yield bench
    finally:
        for gate in bench.engine.gates.values():
            gate.set()
        bench.commands.put(None)
        thread.join(30)
        assert not thread.is_alive()


def load(instance_id: str, serial: int, name: str) -> Load:
    return Load(instance_id=instance_id, serial=serial, model=model(name), gpus=1)


def test_the_engine_goes_on_while_a_model_is_prepared() -> None:
    with running() as bench:
        bench.engine.working = True
        bench.tell(load("i1", 1, "tide"))
        for _ in range(50):
            assert isinstance(bench.hear(lambda report: isinstance(report, Outputs)), Outputs)
        bench.tell(Cancel(request_id="r1"), Release(request_id="r2"), AskStats())
        bench.hear(lambda report: isinstance(report, Stats))
        bench.engine.gate("tide").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=1)
        assert [call for call in bench.engine.calls if call != "prepare tide"] == [
            "cancel r1",
            "release r2",
            "load i1 tide",
        ]


def test_loads_queue_and_each_is_answered() -> None:
    with running() as bench:
        bench.tell(load("i1", 1, "tide"), load("i2", 2, "broken"), load("i3", 3, "ebb"))
        bench.engine.gate("ebb").set()
        bench.engine.gate("tide").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=1)
        bench.engine.gate("broken").set()
        assert bench.answer() == LoadFailed(instance_id="i2", serial=2, error="no such checkpoint")
        assert bench.answer() == Loaded(instance_id="i3", serial=3)
        prepared = [call for call in bench.engine.calls if call.startswith("prepare")]
        assert prepared == ["prepare tide", "prepare broken", "prepare ebb"]


def test_unloading_cancels_a_load_whether_it_has_begun_or_not() -> None:
    with running() as bench:
        bench.tell(load("i1", 1, "tide"), load("i2", 2, "ebb"), Unload(instance_id="i2"), Unload(instance_id="i1"))
        cancelled = "unloaded while it was loading"
        assert bench.answer() == LoadFailed(instance_id="i2", serial=2, error=cancelled)
        assert bench.answer() == LoadFailed(instance_id="i1", serial=1, error=cancelled)
        bench.tell(load("i1", 3, "flood"))
        bench.engine.gate("tide").set()
        bench.engine.gate("flood").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=3)
        assert bench.engine.calls == ["prepare tide", "prepare flood", "load i1 flood"]
