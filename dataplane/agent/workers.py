"""One slot as the agent sees it: its worker process and the instances it holds.

A worker may die at any moment, even at its start, any number of times; or none can be started for want of memory. The
slot then starts another after a pause and loads its instances again, while other slots go on; the slot's owner sends
the requests that were lost with it where they can go on, or keeps them for a while.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from dataplane.agent.host_files import HostFiles
from dataplane.agent.hosted_instances import HostedInstance, HostedInstances
from dataplane.agent.settings import AgentSettings
from dataplane.agent.tokenization import Text
from dataplane.agent.worker_link import WorkerLink
from dataplane.checkpoints.local import ProgressLog
from dataplane.engines.core.devices import VISIBLE, visible_gpus
from dataplane.engines.core.pressure import vllm_refusal
from dataplane.engines.interface import EngineOutput, EngineStats, InstanceStats
from dataplane.engines.vllm.version import check_version
from dataplane.protocol.errors import DataplaneError, ModelLoadError
from dataplane.protocol.messages import DesiredInstance, EngineKind
from dataplane.worker.frames import Command, Configure, FrameError, Loaded, LoadFailed, Outputs, Refused, Report, Stats

log = structlog.get_logger()

BACKOFF_MIN_S = 0.1
STEADY_S = 10.0
"""A worker that lived so long did not die of its start: the next one comes at once."""
START_FAILURES_MAX = 2
"""Workers that may end one after the other without a word before the slot's instances count as failed. Others are
started all the same, and the first that says a word loads them again.
"""


class SlotOwner(Protocol):
    """Who has the requests of a slot."""

    def in_use(self, instance_id: str) -> bool:
        """Whether requests of an instance are in flight."""

    def changed(self, instance_id: str) -> None:
        """An instance came, went, or changed its state on a slot."""

    def heard(self, slot: "Slot", outputs: tuple[EngineOutput, ...]) -> None:
        """A worker made tokens."""

    def refused(self, request_id: str, error: DataplaneError) -> None:
        """A worker did not take a request."""

    def lost(self, slot: "Slot", *, died: bool) -> None:
        """A worker is gone, with all it had: it died, or made way for another engine."""


class Slot:
    """One slot. `stats_heard_s` is when its engine last reported its load, by `time.monotonic`; `worker_start_s` is how
    long the latest worker took from its start until it could load models.
    """

    def __init__(
        self,
        index: int,
        settings: AgentSettings,
        files: HostFiles,
        texts: WeakValueDictionary[str, Text],
        owner: SlotOwner,
    ) -> None:
        self.index = index
        self.kind = settings.kinds()[index]
        self.gpus = settings.slots[index].gpus
        self.restarts_total = 0
        self.stats = EngineStats()
        self.stats_heard_s = time.monotonic()
        self.worker_start_s = 0.0
        self._settings = settings
        self._files = files
        self._owner = owner
        self._hosted = HostedInstances(
            settings.engine,
            texts,
            slot_gpus=self.gpus,
            sources=settings.sources(),
            load_retry_s=settings.load_retry_s,
            refusal=self._refusal,
            in_use=owner.in_use,
            on_change=owner.changed,
        )
        self._alone = (index,) in settings.pools()
        self._engine: EngineKind = settings.engine
        self._link: WorkerLink | None = None
        self._said_hello = False
        self._makes_way = False
        self._worker_started_s = time.monotonic()
        self._switches_before = 0
        self._preemptions_before = 0.0
        self._load_before_s = 0.0

    @property
    def engine(self) -> EngineKind:
        """What its worker runs, or the next one will."""
        return self._engine

    @property
    def pid(self) -> int | None:
        """The worker's process id; None between two workers."""
        return None if self._link is None else self._link.pid

    @property
    def unread_bytes(self) -> int:
        """Bytes of commands that its worker has not read; it reads on while it loads, but not for ever."""
        return 0 if self._link is None else self._link.unread_bytes

    @property
    def switches_total(self) -> int:
        """Model switches of all workers this slot has had."""
        return self._switches_before + self.stats.switches_total

    @property
    def preemptions_total(self) -> float:
        """Requests preempted by all workers this slot has had."""
        return self._preemptions_before + self.stats.extra.get("preemptions", 0.0)

    @property
    def load_s(self) -> float:
        """How long requests stood still since models were loaded beside theirs, of all workers this slot has had."""
        return self._load_before_s + self.stats.extra.get("load_s", 0.0)

    @property
    def load(self) -> float:
        """How busy its decodes keep it (Aegaeon eq. 3, alpha); above 1 it cannot keep up."""
        return 0.0 if self.stats.pool is None else self.stats.pool.load

    def kv_tokens_max(self, instance_id: str) -> int | None:
        """The tokens that a request alone could fill the slot's KV with; None if the instance is not held here."""
        return next((one.kv_tokens_max for one in self.stats.instances if one.instance_id == instance_id), None)

    async def run(self) -> None:
        """Keep a worker running until cancelled; then end it."""
        backoff_s, failures = BACKOFF_MIN_S, 0
        try:
            while True:
                started_s = time.monotonic()
                end = await self._run_worker()
                failures = 0 if self._said_hello or self._makes_way else failures + 1
                self._worker_lost(end, failures)
                backoff_s = BACKOFF_MIN_S if time.monotonic() - started_s > STEADY_S else backoff_s
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.worker_backoff_max_s)
                self.restarts_total += 1
        finally:
            self._hosted.close()

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Make the slot hold these instances and no others. When none of them runs on the present engine any more, the
        next worker has theirs.
        """
        desired = tuple(desired)
        asked = [engine_of(instance, self._settings.engine) for instance in desired]
        wanted = [engine for engine in asked if self._unusable(engine) is None]
        if wanted and self._engine not in wanted:
            self._engine = wanted[0]
            self._hosted.engine_changed()
            if self._link is not None:
                self._makes_way = True
                self._link.hang_up()
        self._hosted.follow(desired)

    def settle(self, instance_id: str) -> None:
        """Unload the instance if it drains and has nothing left to do."""
        self._hosted.settle(instance_id)

    def fetches(self) -> dict[str, ProgressLog]:
        """How far the checkpoints have come that are being fetched, by instance."""
        return self._hosted.fetches()

    def hosted(self, instance_id: str) -> HostedInstance | None:
        """The instance, unless it is not here or drained."""
        return self._hosted.get(instance_id)

    def waits_for(self, instance_id: str) -> str | None:
        """What keeps an instance from serving; None: nothing does, or it failed."""
        return self._hosted.waits_for(instance_id)

    def is_ready(self, instance_id: str) -> bool:
        """Whether the worker takes requests of the instance."""
        hosted = self._hosted.get(instance_id)
        return self._link is not None and hosted is not None and hosted.state in ("ready", "draining")

    def instance_stats(self, instance_id: str) -> InstanceStats | None:
        """The worker's last word about an instance."""
        return next((stats for stats in self.stats.instances if stats.instance_id == instance_id), None)

    def kv_used_beside_bytes(self, instance_id: str) -> int:
        """KV of the slot's other instances, by the worker's last word."""
        return sum(stats.kv_used_bytes for stats in self.stats.instances if stats.instance_id != instance_id)

    def send(self, command: Command) -> None:
        """Tell the worker. It has forgotten everything when there is none."""
        if self._link is not None:
            self._link.send(command)

    def _refusal(self, instance: DesiredInstance) -> str | None:
        """Why an instance cannot run on this slot, as things are."""
        wanted = engine_of(instance, self._settings.engine)
        unusable = self._unusable(wanted)
        if unusable is None and wanted != self._engine:
            return f"slot {self.index} runs {self._engine} for other models; {instance.model.name} wants {wanted}"
        return unusable

    def _unusable(self, engine: EngineKind) -> str | None:
        """Why the slot can never run an engine."""
        if engine != "vllm":
            return None
        if self.kind != "both":
            return f"slot {self.index} is a {self.kind} slot; vLLM needs one that does both"
        if not self._alone:
            return f"slot {self.index} serves together with others; vLLM needs one of its own"
        try:
            check_version()
        except ModelLoadError as error:
            return error.message
        return vllm_refusal(self._settings.kv_pressure)

    async def _run_worker(self) -> str:
        """Have a worker until it is gone. How it ended, in words."""
        try:
            return f"with status {await self._serve_worker()}"
        except (OSError, FrameError) as error:
            return f"by {type(error).__name__}: {error}"

    async def _serve_worker(self) -> int:
        """Start a worker and listen to it until it is gone. Its exit status.

        Raises:
            OSError: it cannot be started.
            FrameError: it said something that cannot be read, and was ended.
        """
        self._said_hello = self._makes_way = False
        kv_file = self._files.new_kv_file(self.index) if self.kind == "prefill" else None
        engine, self._worker_started_s = self._engine, time.monotonic()
        asked = configure(self._settings, self.index, kv_file, self._files, engine)
        link = await WorkerLink.start(asked, worker_environment(self._settings, self.index, os.environ))
        self._link, self._makes_way = link, engine != self._engine
        log.info("worker started", slot=self.index, kind=self.kind, engine=engine, pid=link.pid)
        if self._makes_way:
            link.hang_up()
        try:
            async for report in link.reports():
                self._hear(report)
        finally:
            self._link = None
            status = await link.stop()
            if kv_file is not None:
                kv_file.unlink(missing_ok=True)
        return status

    def _worker_lost(self, end: str, failures: int) -> None:
        if self._makes_way:
            log.info("worker made way", slot=self.index, engine=self._engine)
        else:
            log.warning("worker lost", slot=self.index, end=end)
        self._switches_before, self._preemptions_before = self.switches_total, self.preemptions_total
        self._load_before_s = self.load_s
        self.stats = EngineStats()
        self._hosted.worker_lost(end)
        if failures >= START_FAILURES_MAX:
            self._hosted.fail_all(f"{failures} worker processes ended at their start, the last {end}")
        self._owner.lost(self, died=not self._makes_way)

    def _hear(self, report: Report) -> None:
        match report:
            case Stats():
                self.stats, self.stats_heard_s = report.stats, time.monotonic()
                self._hear_hello()
            case Outputs():
                self._owner.heard(self, report.outputs)
            case Loaded():
                self._hosted.loaded(report.instance_id, report.serial)
            case LoadFailed():
                self._hosted.load_failed(report.instance_id, report.serial, report.error)
            case Refused():
                error = DataplaneError(report.message, param=report.param)
                error.status, error.code = report.status, report.code
                self._owner.refused(report.request_id, error)

    def _hear_hello(self) -> None:
        """The first stats of a worker say that its engine is up."""
        if not self._said_hello and not self._makes_way and self._link is not None:
            self._said_hello = True
            self.worker_start_s = time.monotonic() - self._worker_started_s
            log.info("worker ready", slot=self.index, start_s=round(self.worker_start_s, 2))
            self._hosted.worker_ready(self._link.send)


def engine_of(instance: DesiredInstance, default: EngineKind) -> EngineKind:
    """The engine that an instance runs on, `default` being the node's. A pooled one, which has no GPUs of its own, is
    torch's: switching is what that is made for.
    """
    if default == "replay":
        return "replay"
    if not instance.gpus:
        return "torch"
    return default if instance.model.engine == "auto" else instance.model.engine


def worker_environment(settings: AgentSettings, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker of a slot, from the agent's own. It sees the slot's GPUs and no others: a thread of
    it that chooses none takes the first one.
    """
    given = {"OMP_NUM_THREADS": "1"} | dict(environment)
    gpus = settings.gpus_of(index)
    if gpus and settings.engine != "replay":
        given[VISIBLE] = visible_gpus(gpus, environment)
    return given


def configure(
    settings: AgentSettings, index: int, host_kv_file: Path | None, files: HostFiles, engine: EngineKind
) -> Configure:
    """What a worker of a slot must be."""
    slot = settings.slots[index]
    return Configure(
        engine=engine,
        device=settings.worker_device,
        dtype=settings.dtype,
        weights_bytes=settings.weights_bytes(slot),
        kv_bytes=settings.kv_bytes(slot),
        host_kv_bytes=settings.host_kv_bytes_of(slot),
        host_kv_file=None if host_kv_file is None else str(host_kv_file),
        slab_bytes=settings.slab_bytes,
        cache_folder=str(files.models),
        cache_bytes=files.cache_bytes,
        host_wait_max_s=settings.host_wait_max_s,
        kv_pressure=settings.kv_pressure,
        batch_max=settings.batch_max,
        hands_over=settings.kinds()[index] == "prefill",
        prefetch=settings.prefetch,
        turns=settings.turns,
        profile=None if settings.profile is None else str(settings.profile),
        replay_speed=settings.replay_speed,
        replay_mean_tokens=settings.replay_mean_tokens,
        vllm_models_max=settings.vllm_models_max,
    )
