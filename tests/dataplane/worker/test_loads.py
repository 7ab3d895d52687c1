"""Loads: a worker's loop continues while models are prepared one after the other, and loses no command."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats
from dataplane.memory.model_cache import HostMemoryError
from dataplane.protocol.errors import BadRequestError, DeviceLostError, ModelLoadError
from dataplane.protocol.messages import Constraint, ModelSpec
from dataplane.worker import main as worker_main
from dataplane.worker.frames import (
    Add,
    Cancel,
    Command,
    Load,
    Loaded,
    LoadFailed,
    LoadStage,
    Outputs,
    Refused,
    Release,
    Report,
    Stats,
    Unload,
)
from dataplane.worker.main import Worker
from tests.dataplane.replay_node import model
from tests.event_loop import PATIENCE_S


class GatedEngine:
    """An engine whose `prepare` of a model waits for its gate, and that has work while `working`. What is unloaded is
    prepared no more.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.prepared: set[str] = set()
        self.gates: dict[str, threading.Event] = {}
        self.full = threading.Event()
        self.short: queue.Queue[str] = queue.Queue()
        """Each failed try of a load that does not fit."""
        self.working = False
        self.failed: dict[str, str] = {}

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def prepare(self, spec: ModelSpec) -> None:
        self.calls.append(f"prepare {spec.name}")
        self.prepared.add(spec.name)
        assert self.gate(spec.name).wait(30)
        if spec.name == "broken":
            raise ModelLoadError("no such checkpoint")
        if spec.name == "large" and self.full.is_set():
            self.short.put(spec.name)
            raise HostMemoryError("large: 7 bytes do not fit: 3 bytes lack; models in use: ebb", lack_bytes=3)

    def is_prepared(self, spec: ModelSpec) -> bool:
        return spec.name in self.prepared

    def forget(self, spec: ModelSpec) -> None:
        self.calls.append(f"forget {spec.name}")

    def load(self, instance_id: str, spec: ModelSpec, *, gpus: int = 1) -> None:
        self.calls.append(f"load {instance_id} {spec.name}")
        if spec.name == "cursed":
            raise DeviceLostError("an illegal memory access")

    def unload(self, instance_id: str) -> None:
        self.calls.append(f"unload {instance_id}")
        self.prepared.clear()
        self.failed.pop(instance_id, None)

    def compile(self, request: EngineRequest) -> None:
        assert self.gate(request.request_id).wait(30)
        if request.request_id == "hard":
            raise BadRequestError("too hard", param="response_format")

    def add(self, request: EngineRequest) -> None:
        self.calls.append(f"add {request.request_id}")

    def cancel(self, request_id: str) -> None:
        self.calls.append(f"cancel {request_id}")

    def release(self, request_id: str) -> None:
        self.calls.append(f"release {request_id}")

    def has_work(self) -> bool:
        return self.working

    def step(self) -> list[EngineOutput]:
        return [EngineOutput(request_id="busy", token_ids=(1,))]

    def stats(self) -> EngineStats:
        return EngineStats(failed=dict(self.failed))


class Bench:
    """A worker on a thread, and its reports."""

    def __init__(self) -> None:
        self.engine = GatedEngine()
        self.commands: queue.Queue[Any] = queue.Queue()
        self.reports: queue.Queue[Report] = queue.Queue()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.commands.put(command)

    def report(self, wanted: Callable[[Report], bool]) -> Report:
        """The next report that is wanted; those before it are dropped."""
        until_s = time.monotonic() + PATIENCE_S
        while not wanted(report := self.reports.get(timeout=PATIENCE_S)):
            assert time.monotonic() < until_s, "only other reports come"
        return report

    def answer(self) -> Report:
        """The next answer to a load."""
        return self.report(lambda report: isinstance(report, Loaded | LoadFailed))


@contextmanager
def running(host_wait_max_s: float = 60.0, **changes: Any) -> Iterator[Bench]:
    bench = Bench()
    engine: Any = bench.engine
    worker = Worker(engine, bench.commands, bench.reports.put, host_wait_max_s=host_wait_max_s, **changes)
    thread = threading.Thread(target=worker.run)
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
        bench.send(load("i1", 1, "tide"))
        for _ in range(50):
            assert isinstance(bench.report(lambda report: isinstance(report, Outputs)), Outputs)
        bench.send(Cancel(request_id="r1"), Release(request_id="r2"), Unload(instance_id="other"))
        bench.report(lambda report: isinstance(report, Stats))
        bench.engine.gate("tide").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=1)
        assert [call for call in bench.engine.calls if call != "prepare tide"] == [
            "cancel r1",
            "release r2",
            "load i1 tide",
        ]


def test_an_instance_that_failed_after_its_load_is_unloaded_and_reported_once() -> None:
    with running() as bench:
        for number, name in enumerate(("tide", "ebb"), start=1):
            bench.engine.gate(name).set()
            bench.send(load(f"i{number}", number, name))
            assert bench.answer() == Loaded(instance_id=f"i{number}", serial=number)
        bench.engine.failed = {"i1": "its weights cannot be read"}
        assert bench.answer() == LoadFailed(instance_id="i1", serial=1, error="its weights cannot be read")
        bench.send(load("i1", 3, "tide"))
        assert bench.answer() == Loaded(instance_id="i1", serial=3)
        assert [call for call in bench.engine.calls if call.startswith("unload")] == ["unload i1"]


def test_an_idle_worker_goes_on_reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the agent sees when one hangs."""
    monkeypatch.setattr(worker_main, "STATS_REPEAT_S", 0.0)
    with running() as bench:
        for _ in range(3):
            bench.report(lambda report: isinstance(report, Stats))


def test_loads_queue_and_each_is_answered() -> None:
    with running() as bench:
        bench.send(load("i1", 1, "tide"), load("i2", 2, "broken"), load("i3", 3, "ebb"))
        bench.engine.gate("ebb").set()
        bench.engine.gate("tide").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=1)
        bench.engine.gate("broken").set()
        assert bench.answer() == LoadFailed(instance_id="i2", serial=2, error="no such checkpoint")
        assert "forget broken" in bench.engine.calls
        assert bench.answer() == Loaded(instance_id="i3", serial=3)
        prepared = [call for call in bench.engine.calls if call.startswith("prepare")]
        assert prepared == ["prepare tide", "prepare broken", "prepare ebb"]


def test_a_load_that_loses_the_device_ends_the_worker() -> None:
    bench = Bench()
    engine: Any = bench.engine
    worker = Worker(engine, bench.commands, bench.reports.put, host_wait_max_s=60.0)
    bench.engine.gate("cursed").set()
    bench.send(load("i1", 1, "cursed"))
    with pytest.raises(DeviceLostError):
        worker.run()


def test_unloading_cancels_a_load_whether_it_has_begun_or_not() -> None:
    with running() as bench:
        bench.send(load("i1", 1, "tide"), load("i2", 2, "ebb"), Unload(instance_id="i2"), Unload(instance_id="i1"))
        cancelled = "unloaded while it was loading"
        assert bench.answer() == LoadFailed(instance_id="i2", serial=2, error=cancelled)
        assert bench.answer() == LoadFailed(instance_id="i1", serial=1, error=cancelled)
        bench.send(load("i1", 3, "flood"))
        bench.engine.gate("tide").set()
        bench.engine.gate("flood").set()
        assert bench.answer() == Loaded(instance_id="i1", serial=3)
        expected = {"prepare tide", "forget tide", "prepare flood", "load i1 flood"}
        assert sorted(bench.engine.calls) == sorted(expected), "what was prepared for no instance is forgotten"


def test_a_model_whose_other_instance_was_unloaded_meanwhile_is_prepared_again() -> None:
    """It would else be read on the main loop."""
    with running() as bench:
        gate = bench.engine.gate("tide")
        gate.set()
        bench.send(load("i1", 1, "tide"))
        assert bench.answer() == Loaded(instance_id="i1", serial=1)
        gate.clear()
        bench.send(load("i2", 2, "tide"))
        bench.report(lambda report: report == LoadStage(instance_id="i2", serial=2, begun=True))
        bench.send(Unload(instance_id="i1"))
        bench.report(lambda report: isinstance(report, Stats) and "unload i1" in bench.engine.calls)
        gate.set()
        assert bench.answer() == Loaded(instance_id="i2", serial=2)
        assert bench.engine.calls[-3:] == ["unload i1", "prepare tide", "load i2 tide"]


def test_a_load_that_does_not_fit_is_retried_after_the_others() -> None:
    with running(prepare_retry_s=0.01) as bench:
        bench.engine.working = True
        bench.engine.full.set()
        for name in ("large", "tide"):
            bench.engine.gate(name).set()
        bench.send(load("i1", 1, "large"), load("i2", 2, "tide"))
        assert bench.answer() == Loaded(instance_id="i2", serial=2)
        for _ in range(3):
            bench.engine.short.get(timeout=30)
            for begun in (True, False):
                stage = LoadStage(instance_id="i1", serial=1, begun=begun)
                bench.report(lambda report, stage=stage: report == stage)
        bench.engine.full.clear()
        assert bench.answer() == Loaded(instance_id="i1", serial=1)


def test_a_load_that_never_fits_fails_with_the_name_of_the_limit() -> None:
    with running(host_wait_max_s=0.1) as bench:
        bench.engine.full.set()
        bench.engine.gate("large").set()
        bench.send(load("i1", 1, "large"))
        failed = bench.answer()
        assert isinstance(failed, LoadFailed)
        assert failed.error == (
            "too little free host memory for longer than host_wait_max_s=0.1:"
            " large: 7 bytes do not fit: 3 bytes lack; models in use: ebb"
        )
        bench.engine.full.clear()
        bench.send(load("i1", 2, "large"))
        assert bench.answer() == Loaded(instance_id="i1", serial=2)


def test_a_load_that_waits_for_memory_can_be_unloaded() -> None:
    with running() as bench:
        bench.engine.full.set()
        bench.engine.gate("large").set()
        bench.send(load("i1", 1, "large"))
        bench.engine.short.get(timeout=30)
        bench.send(Unload(instance_id="i1"))
        assert bench.answer() == LoadFailed(instance_id="i1", serial=1, error="unloaded while it was loading")


def test_requests_wait_for_their_constraint_and_others_do_not() -> None:
    def add(request_id: str, *, constrained: bool = True) -> Add:
        constraint = Constraint(kind="json_object") if constrained else None
        return Add(
            request=EngineRequest(
                request_id=request_id, instance_id="i", tier="NIW", prompt=(1,), max_tokens=1, constraint=constraint
            )
        )

    with running() as bench:
        bench.engine.working = True
        bench.send(
            add("slow"), add("cancelled"), add("hard"), Cancel(request_id="cancelled"), add("free", constrained=False)
        )
        while "add free" not in bench.engine.calls:
            bench.report(lambda report: isinstance(report, Outputs))
        assert bench.engine.calls == ["cancel cancelled", "add free"]
        for request_id in ("slow", "cancelled", "hard"):
            bench.engine.gate(request_id).set()
        refused = bench.report(lambda report: isinstance(report, Refused))
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.status, refused.param) == ("hard", 400, "response_format")
        assert bench.engine.calls == ["cancel cancelled", "add free", "add slow"]
