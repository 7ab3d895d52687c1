"""One slot as the agent sees it: the worker process, the instances it holds and the requests in flight.

A worker may die at any moment. The slot then starts another, loads its instances again and resubmits the requests in
flight with the tokens made so far; sampling depends on the position alone, so their clients see nothing but a pause.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from dataplane.engine import EngineRequest, EngineStats
from dataplane.errors import DataplaneError, UnknownInstanceError, WorkerLostError
from dataplane.flights import Flight, Flights
from dataplane.frames import Add, Cancel, Configure, Loaded, LoadFailed, Outputs, Refused, Report, Stats
from dataplane.held import HeldInstance, HeldInstances
from dataplane.messages import DesiredInstance, InstanceReport
from dataplane.settings import AgentSettings, SlotSettings
from dataplane.worker_link import WorkerLink

log = structlog.get_logger()

BACKOFF_MIN_S = 0.1
STEADY_S = 10.0
"""A worker that lived so long did not die of its start: the next one comes at once."""
START_FAILURES_MAX = 2
"""Workers that may end one after the other without a word before the slot's instances count as failed."""


class Slot:
    """One slot. `on_change` is called when the control plane should hear of a change."""

    def __init__(
        self, index: int, slot: SlotSettings, settings: AgentSettings, *, on_change: Callable[[], None]
    ) -> None:
        self.index = index
        self.restarts_total = 0
        self._settings = settings
        self._configure = configure(slot, settings)
        self._flights = Flights(settings.worker_losses_max)
        self._held = HeldInstances(
            settings.engine, self._flights, load_retry_s=settings.load_retry_s, on_change=on_change
        )
        self._link: WorkerLink | None = None
        self._said_hello = False
        self._stats = EngineStats()
        self._switches_before = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id; None between two workers."""
        return None if self._link is None else self._link.pid

    @property
    def in_flight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._flights)

    @property
    def switches_total(self) -> int:
        """Model switches of all workers this slot has had."""
        return self._switches_before + self._stats.switches_total

    @property
    def stats(self) -> EngineStats:
        """The engine's last word about its load."""
        return self._stats

    async def run(self) -> None:
        """Keep a worker running until cancelled; then end it."""
        backoff_s, failures = BACKOFF_MIN_S, 0
        try:
            while True:
                started_s = time.monotonic()
                status = await self._serve_worker()
                failures = 0 if self._said_hello else failures + 1
                self._worker_lost(status, failures)
                backoff_s = BACKOFF_MIN_S if time.monotonic() - started_s > STEADY_S else backoff_s
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.worker_backoff_max_s)
                self.restarts_total += 1
        finally:
            self._held.close()
            self._flights.end_all(WorkerLostError("the agent is shutting down"))

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Make the slot hold these instances and no others."""
        self._held.follow(desired)

    def holds(self, instance_id: str) -> bool:
        """Whether the instance is on this slot."""
        return self._held.get(instance_id) is not None

    def ready_instance(self, instance_id: str) -> HeldInstance:
        """An instance that takes requests.

        Raises:
            dataplane.errors.UnknownInstanceError: it is not here, or loading, draining or failed.
            dataplane.errors.WorkerLostError: the worker was lost and its successor is loading.
        """
        held = self._held.get(instance_id)
        if held is None:
            raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
        if held.state == "loading" and held.reloading:
            raise WorkerLostError(f"slot {self.index} lost its worker; instance {instance_id} is being loaded again")
        if held.state != "ready":
            raise UnknownInstanceError(f"instance {instance_id} is {held.state}", param="instance_id")
        return held

    def kv_capacity_bytes(self, instance_id: str) -> int:
        """The KV memory of an instance."""
        reported = (stats.kv_capacity_bytes for stats in self._stats.instances if stats.instance_id == instance_id)
        return next(reported, self._configure.kv_bytes_per_gpu)

    def submit(self, request: EngineRequest) -> Flight:
        """Send a request to a ready instance; raises as `ready_instance` does."""
        self.ready_instance(request.instance_id)
        assert self._link is not None, "an instance is ready only while a worker holds it"
        flight = self._flights.open(request)
        self._link.send(Add(request=request))
        return flight

    def cancel(self, request: EngineRequest) -> None:
        """Drop a request at once. One that has ended is ignored."""
        if self._flights.drop(request.request_id):
            if self._link is not None:
                self._link.send(Cancel(request_id=request.request_id))
            self._held.settle(request.instance_id)

    def reports(self) -> list[InstanceReport]:
        """What the control plane hears of this slot's instances. Drained ones are gone from it."""
        return [self._report(held) for held in self._held.visible()]

    def _report(self, held: HeldInstance) -> InstanceReport:
        report = InstanceReport(
            instance_id=held.instance_id,
            model=held.desired.model.name,
            slot=self.index,
            state=held.state,
            error=held.error,
        )
        stats = next((stats for stats in self._stats.instances if stats.instance_id == held.instance_id), None)
        if stats is None:
            return report
        return msgspec.structs.replace(
            report,
            kv_used_bytes=stats.kv_used_bytes,
            kv_capacity_bytes=stats.kv_capacity_bytes,
            remaining_tokens=stats.remaining_tokens,
            running=stats.running,
            waiting=stats.waiting,
        )

    async def _serve_worker(self) -> int:
        """Start a worker and listen to it until it is gone. Its exit status."""
        link = await WorkerLink.start(self._configure)
        self._link, self._said_hello = link, False
        log.info("worker started", slot=self.index, pid=link.pid)
        try:
            async for report in link.reports():
                self._hear(report)
        finally:
            self._link = None
            status = await link.stop()
        return status

    def _worker_lost(self, status: int, failures: int) -> None:
        log.warning("worker lost", slot=self.index, status=status, in_flight=len(self._flights))
        self._switches_before += self._stats.switches_total
        self._stats = EngineStats()
        self._flights.lose_worker()
        self._held.worker_lost(status)
        if failures >= START_FAILURES_MAX:
            self._held.fail_all(f"{failures} worker processes ended at their start, the last with status {status}")

    def _hear(self, report: Report) -> None:
        match report:
            case Stats():
                self._stats = report.stats
                self._hear_hello()
            case Outputs():
                for output in report.outputs:
                    self._flights.hear(output)
                self._settle_draining()
            case Loaded():
                self._held.loaded(report.instance_id, report.serial)
            case LoadFailed():
                self._held.load_failed(report.instance_id, report.serial, report.error)
            case Refused():
                error = DataplaneError(report.message, param=report.param)
                error.status, error.code = report.status, report.code
                self._flights.end(report.request_id, error)
                self._settle_draining()

    def _hear_hello(self) -> None:
        """The first stats of a worker say that its engine is up."""
        if not self._said_hello and self._link is not None:
            self._said_hello = True
            self._held.worker_ready(self._link.send)

    def _settle_draining(self) -> None:
        for held in self._held.visible():
            if held.state == "draining":
                self._held.settle(held.instance_id)


def configure(slot: SlotSettings, settings: AgentSettings) -> Configure:
    """What a worker of this slot must be."""
    return Configure(
        engine=settings.engine,
        device=settings.device,
        dtype=settings.dtype,
        weights_bytes=settings.weights_bytes(slot),
        kv_bytes_per_gpu=settings.kv_bytes_per_gpu(slot),
        batch_max=settings.batch_max,
        turn_time_s=settings.turn_time_s,
        profile=None if settings.profile is None else str(settings.profile),
        replay_speed=settings.replay_speed,
        replay_mean_tokens=settings.replay_mean_tokens,
    )
