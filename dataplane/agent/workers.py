"""One worker as the agent sees it: its process, which is restarted when it dies, and the instances that it hosts.

A worker process may die at any time, also at its start, any number of times; or the machine has no memory to start one.
The supervisor then starts another after a backoff and loads its instances again; the node's other workers continue. The
owner continues the requests that were lost with the process elsewhere, or keeps them until the next one is ready.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from dataplane.agent.host_files import HostFiles
from dataplane.agent.hosted_instances import HostedInstances
from dataplane.agent.settings import AgentSettings
from dataplane.agent.slot_hosts import SlotHosts
from dataplane.agent.tokenization import TokenizerCache
from dataplane.agent.worker_link import WorkerLink
from dataplane.engines.core.devices import VISIBLE, visible_gpus
from dataplane.engines.core.pressure import vllm_refusal
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats, InstanceStats
from dataplane.engines.vllm.version import check_version
from dataplane.memory.shared_events import event_file
from dataplane.protocol.errors import DataplaneError, ModelLoadError
from dataplane.protocol.host_states import HostState
from dataplane.protocol.messages import DesiredInstance, EngineKind
from dataplane.worker.frames import (
    Add,
    Cancel,
    Command,
    Configure,
    FrameError,
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

log = structlog.get_logger()

BACKOFF_MIN_S = 0.1
STEADY_S = 10.0
"""A process that ran for so long did not die of its start: the next one starts after the shortest backoff."""
START_FAILURES_MAX = 2
"""Processes in a row that may end before they report, until the worker's instances count as failed. The supervisor goes
on to start others, and the first one that reports loads the instances again.
"""
HOSTS_LOOK_S = 0.25
"""How often a worker of several hosts looks whether all of them report."""
SILENT_LOOKS = 20
"""How often a process is looked at within a limit of its silence. Looks without a report are counted, not seconds: the
agent or the whole machine may have been stopped for a while.
"""
UNLIMITED_LOOK_S = 10.0
"""How often it is looked whether another limit holds, where there is none."""


StartWorker = Callable[[Configure, Mapping[str, str]], Awaitable[WorkerLink]]
"""Starts a worker process from its first command and its environment.

Raises:
    OSError: it cannot be started.
"""


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """What the workers of a node share."""

    settings: AgentSettings
    files: HostFiles
    tokenizers: TokenizerCache
    start_worker: StartWorker


class WorkerOwner(Protocol):
    """What tracks the requests of a worker."""

    def in_use(self, instance_id: str) -> bool:
        """Whether requests of an instance are in flight."""

    def has_requests(self, worker: "WorkerSupervisor") -> bool:
        """Whether requests are on a worker."""

    def instance_changed(self, instance_id: str) -> None:
        """An instance was added to a worker, removed from it, or changed its state there."""

    def outputs_received(self, worker: "WorkerSupervisor", outputs: tuple[EngineOutput, ...]) -> None: ...

    def request_refused(self, request_id: str, error: DataplaneError) -> None: ...

    def worker_lost(self, worker: "WorkerSupervisor", *, died: bool) -> None:
        """A worker process is gone, with its requests and their KV: it died, or another engine replaces it."""


class WorkerSupervisor:
    """Keeps one worker process running. `stats_s` is when its engine last reported statistics, by `time.monotonic`;
    `worker_start_s` is how long the latest process took from its start until it could load models. `index`: its number
    on the node, which is that of its first GPU where these are regrouped.
    """

    def __init__(self, index: int, node: NodeResources, owner: WorkerOwner) -> None:
        """`index`: of its settings."""
        settings = node.settings
        self.index = settings.numbers[index] if settings.regroup else index
        self._settings_index = index
        self.kind = settings.kinds[index]
        self.gpus = settings.slots[index].gpus
        self.ranks = settings.ranks_of(index)
        self.engine: EngineKind = settings.engine
        """The engine of its process, or of the next one."""
        self.restarts_total = 0
        self.stats = EngineStats()
        self.stats_s = time.monotonic()
        self.worker_start_s = 0.0
        self._node = node
        self._settings = settings
        self._owner = owner
        hosts = settings.slots[index].hosts
        self.hosts = SlotHosts(self.index, hosts) if hosts > 1 else None
        """The other hosts of its GPUs, if it has any."""
        self.hosted = HostedInstances(
            settings.engine,
            node.tokenizers,
            worker_gpus=self.gpus,
            sources=settings.sources,
            load_retry_s=settings.load_retry_s,
            refusal=self._refusal,
            in_use=owner.in_use,
            on_change=owner.instance_changed,
            hosts=self.hosts,
        )
        self._alone = (index,) in settings.groups
        self._link: WorkerLink | None = None
        self._ready = asyncio.Event()
        """Whether the present process has reported."""
        self._reports = 0
        """Of all processes so far."""
        self._configure: Configure | None = None
        """What the present process got first."""
        self._host_loss: str | None = None
        """Why the present process was ended, if another host was the reason."""
        self._host_gone = False
        """Whether that host's follower is gone, and not only its ranks."""
        self.replaced = False
        """Whether the process is ended on purpose, so that one with another engine, or without its model, can start."""
        self._process_started_s = time.monotonic()
        self._totals_before = (0, 0.0, 0.0)
        """`switches_total`, `preemptions_total` and `load_s` of former processes."""

    @property
    def pid(self) -> int | None:
        """The process id; None between two processes."""
        return None if self._link is None else self._link.pid

    @property
    def unread_bytes(self) -> int:
        """Bytes of commands that the process has not read. It keeps reading while it loads, up to a limit."""
        return 0 if self._link is None else self._link.unread_bytes

    @property
    def switches_total(self) -> int:
        """Model switches of all processes so far."""
        return self._totals_before[0] + self.stats.switches_total

    @property
    def preemptions_total(self) -> float:
        """Requests preempted by all processes so far."""
        return self._totals_before[1] + self.stats.extra.get("preemptions", 0.0)

    @property
    def load_s(self) -> float:
        """Seconds for which loads of other models paused requests, of all processes so far."""
        return self._totals_before[2] + self.stats.extra.get("load_s", 0.0)

    @property
    def host_states(self) -> tuple[HostState, ...]:
        """Of the other hosts of its GPUs."""
        return () if self.hosts is None else self.hosts.states()

    @property
    def load(self) -> float:
        """How busy its decodes keep it (Aegaeon eq. 3, alpha); above 1 it cannot keep up."""
        return 0.0 if self.stats.pool is None else self.stats.pool.load

    async def run(self) -> None:
        """Keep a process running until cancelled; then end it."""
        backoff_s, failures = BACKOFF_MIN_S, 0
        try:
            while True:
                await self._wait_for_hosts()
                started_s = time.monotonic()
                end = await self._run_process()
                failures = 0 if self._ready.is_set() or self.replaced or self._host_gone else failures + 1
                self._process_lost(end, failures)
                backoff_s = BACKOFF_MIN_S if time.monotonic() - started_s > STEADY_S else backoff_s
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.worker_backoff_max_s)
                self.restarts_total += not self.replaced  # another engine is no restart
        finally:
            self.hosted.close()

    async def _wait_for_hosts(self) -> None:
        """Until all hosts of the worker report. Its instances fail meanwhile, with the name of one that is missing."""
        while self.hosts is not None and not self.hosts.complete:
            if (missing := self.hosts.missing) is not None:
                self.hosted.fail_all(missing)
            await asyncio.sleep(HOSTS_LOOK_S)

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Host these instances and no others. When none of them runs on the present engine any more, the next process
        has theirs.
        """
        desired = tuple(desired)
        asked = [engine_of(instance, self._settings.engine) for instance in desired]
        usable = [engine for engine in asked if self._unusable(engine) is None]
        if usable and self.engine not in usable:
            self.engine = usable[0]
            self.hosted.engine_changed()
            self._replace_process()
        self.hosted.follow(desired)

    def is_ready(self, instance_id: str) -> bool:
        """Whether it takes requests of the instance."""
        hosted = self.hosted.get(instance_id)
        return self._link is not None and hosted is not None and hosted.state in ("ready", "draining")

    def instance_stats(self, instance_id: str) -> InstanceStats | None:
        """The latest statistics of an instance."""
        return next((stats for stats in self.stats.instances if stats.instance_id == instance_id), None)

    def add(self, request: EngineRequest) -> None:
        self.send(Add(request=request))

    def cancel(self, request_id: str) -> None:
        self.send(Cancel(request_id=request_id))

    def release(self, request_id: str) -> None:
        """Free the KV of a request that this worker prefilled."""
        self.send(Release(request_id=request_id))

    def send(self, command: Command) -> None:
        """Queue a command; without a process it is dropped, since the next one starts without requests."""
        if self._link is not None:
            self._link.send(command)

    def _refusal(self, instance: DesiredInstance) -> str | None:
        """Why an instance cannot run on this worker at present."""
        wanted = engine_of(instance, self._settings.engine)
        unusable = self._unusable(wanted, adapter=instance.model.base is not None)
        if unusable is None and wanted != self.engine:
            return f"worker {self.index} runs {self.engine} for other models; {instance.model.name} wants {wanted}"
        return unusable

    def _unusable(self, engine: EngineKind, *, adapter: bool = False) -> str | None:
        """Why the worker can never run an engine, or an adapter on it."""
        if self.hosts is not None and (engine != "vllm" or adapter):
            return f"worker {self.index} is of {self.hosts.count} hosts, which serve dedicated models on vLLM alone"
        if engine != "vllm":
            return None
        if self.kind != "both":
            return f"worker {self.index} is a {self.kind} worker; vLLM needs one that does both"
        if not self._alone:
            return f"worker {self.index} is in a group with others; vLLM needs a worker of its own"
        if (refusal := self._settings.vllm_split_refusal(self._settings_index)) is not None:
            return f"worker {self.index}: {refusal}"
        try:
            check_version()
        except ModelLoadError as error:
            return error.message
        return vllm_refusal(self._settings.kv_pressure)

    async def _run_process(self) -> str:
        """Run a process until it is gone; how it ended, as the log says it."""
        try:
            status = await self._serve_process()
            return f"with status {status}" if self._host_loss is None else f"as {self._host_loss}"
        except (OSError, FrameError) as error:
            return f"by {type(error).__name__}: {error}"

    async def _serve_process(self) -> int:
        """Start a process and read its reports until it is gone; its exit status.

        Raises:
            OSError: it cannot be started.
            FrameError: a report cannot be read; the process was ended.
        """
        self._ready.clear()
        self.replaced, self._host_loss, self._host_gone = False, None, False
        kv_file = self._node.files.new_kv_file(self.index) if self.kind == "prefill" else None
        engine, self._process_started_s = self.engine, time.monotonic()
        asked = configure(self._settings, self._settings_index, kv_file, self._node.files, engine)
        if self.hosts is not None:
            asked = msgspec.structs.replace(asked, span=self.hosts.begin())
        self._configure = asked
        environment = worker_environment(self._settings, self._settings_index, os.environ)
        link = await self._node.start_worker(asked, environment)
        self._link, self.replaced = link, engine != self.engine
        log.info("worker started", worker=self.index, kind=self.kind, engine=engine, pid=link.pid)
        if self.replaced:
            link.hang_up()
        watch = asyncio.create_task(self._watch(link, engine))
        watch_hosts = asyncio.create_task(self._watch_hosts(link))
        try:
            async for report in link.reports():
                self._receive(report)
        finally:
            watch.cancel()
            watch_hosts.cancel()
            self._link = None
            if self.hosts is not None:
                self.hosts.end()
            status = await link.stop()
            if kv_file is not None:
                kv_file.unlink(missing_ok=True)
                event_file(kv_file).unlink(missing_ok=True)
        return status

    async def _watch(self, link: WorkerLink, engine: EngineKind) -> None:
        """Kill the process if it reports nothing for `worker_start_max_s` from its start, or later for
        `worker_silent_max_s` while it has work: it hangs. Its engine runs on the thread that reports: vLLM builds a
        model there, which is given as long as a start. Other engines read models on another one.
        """
        looks, limit_s, name = 0, 0.0, ""
        while looks < SILENT_LOOKS:
            ready, before = self._ready.is_set(), self._reports
            builds = engine == "vllm" and self.hosted.loads
            name = "worker_silent_max_s" if ready and not builds else "worker_start_max_s"
            limit_s = getattr(self._settings, name)
            look_s = limit_s / SILENT_LOOKS if limit_s else UNLIMITED_LOOK_S
            await (asyncio.sleep(look_s) if ready else self._wait_for_ready(look_s))
            looks = looks + 1 if limit_s and self._reports == before and self._owes_report() else 0
        log.error("worker is silent; ended", worker=self.index, pid=link.pid, **{name: limit_s})
        link.kill()

    async def _wait_for_ready(self, max_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_s):
                await self._ready.wait()

    async def _watch_hosts(self, link: WorkerLink) -> None:
        """End the process when another host cannot go on."""
        while self.hosts is not None:
            gone = self.hosts.loss
            if (loss := gone or self.hosts.failure) is not None:
                log.error("a host of the worker was lost", worker=self.index, pid=link.pid, loss=loss)
                self._host_loss, self._host_gone = loss, gone is not None
                link.hang_up()
                return
            await asyncio.sleep(HOSTS_LOOK_S)

    def _send_hosted(self, command: Command) -> None:
        """A command of the hosted instances. On several hosts a load is for all of them, and an unload ends the
        process, since their ranks end together.
        """
        if self.hosts is None:
            self.send(command)
        elif isinstance(command, Load):
            hosted = self.hosted.get(command.instance_id)
            assert hosted is not None, "it is being loaded"
            assert self._configure is not None, "there is a process"
            if self.hosts.has_model:
                error = f"worker {self.index} has another model, and is of {self.hosts.count} hosts, which have one"
                self.hosted.load_failed(command.instance_id, command.serial, error)
                return
            model = msgspec.structs.replace(command.model, path=hosted.desired.model.path)
            self.hosts.launch(self._configure, model)
            self.send(command)
        elif isinstance(command, Unload):
            self.hosted.process_ends()
            self._replace_process()

    def _replace_process(self) -> None:
        """End the process on purpose, if there is one; the next one starts at once."""
        if self._link is not None:
            self.replaced = True
            self._link.hang_up()

    def _owes_report(self) -> bool:
        """Whether the process must report something: its start, which loads no model, or what it does."""
        busy = not self._ready.is_set() or self.hosted.loads or self._owner.has_requests(self)
        return busy and not self.replaced

    def _process_lost(self, end: str, failures: int) -> None:
        if self.replaced:
            log.info("worker ended for another engine or model", worker=self.index, engine=self.engine)
        else:
            log.warning("worker lost", worker=self.index, end=end)
        self._totals_before = self.switches_total, self.preemptions_total, self.load_s
        self.stats = EngineStats()
        self.hosted.worker_lost(end, host_gone=self._host_gone)
        if failures >= START_FAILURES_MAX:
            self.hosted.fail_all(f"{failures} worker processes ended at their start, the last {end}")
        self._owner.worker_lost(self, died=not self.replaced)

    def _receive(self, report: Report) -> None:
        self._reports += 1
        match report:
            case Stats():
                self.stats, self.stats_s = report.stats, time.monotonic()
                self._note_ready()
            case Outputs():
                self._owner.outputs_received(self, report.outputs)
            case LoadStage():
                self.hosted.load_stage(report.instance_id, report.serial, begun=report.begun)
            case Loaded():
                self.hosted.loaded(report.instance_id, report.serial)
            case LoadFailed():
                self.hosted.load_failed(report.instance_id, report.serial, report.error)
                if self.hosts is not None:
                    self.hosted.process_ends()
                    self._replace_process()
            case Refused():
                error = DataplaneError(report.message, param=report.param)
                error.status, error.code = report.status, report.code
                self._owner.request_refused(report.request_id, error)

    def _note_ready(self) -> None:
        """With the first statistics of a process its engine is ready."""
        if not self._ready.is_set() and not self.replaced and self._link is not None:
            self._ready.set()
            self.worker_start_s = time.monotonic() - self._process_started_s
            log.info("worker ready", worker=self.index, start_s=round(self.worker_start_s, 2))
            self.hosted.worker_ready(self._send_hosted)


def engine_of(instance: DesiredInstance, default: EngineKind) -> EngineKind:
    """The engine that an instance runs on, `default` being the node's. A pooled instance, which has no GPUs of its own,
    runs on the torch engine, which switches models fast, and so does a model that does not generate, unless vLLM is
    named.
    """
    if default == "replay":
        return "replay"
    model = instance.model
    if model.engine == "auto" and (not instance.gpus or model.task != "generate"):
        return "torch"
    return default if model.engine == "auto" else model.engine


def worker_environment(settings: AgentSettings, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker process, from the agent's own. The worker sees its own GPUs first, and no others but
    those whose events it waits for, so that a thread that chooses no device takes the worker's first one.
    """
    given = {"OMP_NUM_THREADS": "1"} | dict(environment)
    gpus = settings.gpus_of(index)
    if gpus and settings.engine != "replay":
        given[VISIBLE] = visible_gpus([*gpus, *settings.awaited_gpus(index)], environment)
    return given


def configure(
    settings: AgentSettings, index: int, host_kv_file: Path | None, files: HostFiles, engine: EngineKind
) -> Configure:
    """The first command of a worker process: its engine and memory."""
    worker, ranks = settings.slots[index], settings.ranks_of(index)
    limits = settings.step_limits(worker)
    return Configure(
        engine=engine,
        device=settings.worker_device,
        dtype=settings.dtype,
        weights_bytes=settings.weights_bytes(worker) // ranks,
        kv_bytes=settings.kv_bytes(worker) // ranks,
        host_kv_bytes=settings.host_kv_bytes_of(worker) // ranks,
        host_kv_file=None if host_kv_file is None else str(host_kv_file),
        slab_bytes=settings.slab_bytes,
        cache_folder=str(files.models),
        cache_bytes=files.cache_bytes,
        host_wait_max_s=settings.host_wait_max_s,
        kv_pressure=settings.kv_pressure,
        prefix_cache=settings.prefix_cache,
        batch_max=limits.batch_max,
        prefill_tokens_max=limits.prefill_tokens_max if engine == "vllm" else settings.prefill_tokens_max,
        prefill_only=settings.kinds[index] == "prefill",
        kv_events=settings.kv_events,
        prefetch=settings.prefetch,
        turns=settings.turns,
        profile=None if settings.profile is None else str(settings.profile),
        replay_speed=settings.replay_speed,
        replay_mean_tokens=settings.replay_mean_tokens,
        vllm_models_max=settings.vllm_models_max,
        vllm_async_scheduling=settings.vllm_async_scheduling,
        vllm_adapters_max=settings.vllm_adapters_max,
        vllm_adapter_rank_max=settings.vllm_adapter_rank_max,
        ranks=ranks,
        adapters_bytes=settings.adapters_bytes,
    )
