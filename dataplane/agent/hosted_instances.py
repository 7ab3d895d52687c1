"""The instances that one worker hosts, and how each is loaded, drained and unloaded.

An instance fails in one of two ways:

- the worker reports that it cannot load it: the next process could not either, so its requests end at once;
- worker processes die at their start (`START_FAILURES_MAX`) or while they load it (`LOAD_LOSSES_MAX`): the control
  plane sees a failed instance and sends nothing new, but the next process may load it, so its requests in flight wait
  as after any loss of a worker, for `worker_wait_max_s` (see `dataplane.agent.worker_groups`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import structlog

from dataplane.agent.parsing.families import families_of
from dataplane.agent.pooled_answers import PoolingRules, read_rules
from dataplane.agent.slot_hosts import SlotHosts
from dataplane.agent.tokenization import Tokenizer, TokenizerCache
from dataplane.checkpoints.adapters import check_adapter
from dataplane.checkpoints.local import ProgressLog, Sources, in_own_thread, local_checkpoint, read_ahead
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import DesiredInstance, EngineKind, InstanceState, ModelSpec
from dataplane.protocol.model_sources import is_remote
from dataplane.worker.frames import Command, Load, Unload

log = structlog.get_logger()

LOAD_LOSSES_MAX = 1
"""Worker processes that may die while they load an instance, until its load counts as failed. It is tried again after
`load_retry_s`: a model that kills workers must leave the worker's other models time to be served.
"""


@dataclass(kw_only=True)
class HostedInstance:
    """An instance of a worker.

    `folder`: its checkpoint on this node, of an adapter its base's. `rules`: of a model that does not generate.
    `load_serial`: of the Load that the present process has not answered yet; `has_begun`: whether that has begun, and
    does not wait for host memory. `losses`: processes in a row that died while they loaded it. `reloading`: it was
    ready or draining until its process was lost.
    `retry`: when a failed load is repeated. `orphaned`: it failed as processes died. `wanted_s`: since when its load
    is desired, by `time.monotonic`. `drained`: unloaded after draining; it is no longer reported, and stays here until
    it is no longer desired. `task`: its latest load; `fetch`: the progress of its checkpoint's download.
    """

    desired: DesiredInstance
    state: InstanceState = "loading"
    folder: str = ""
    tokenizer: Tokenizer | None = None
    rules: PoolingRules | None = None
    error: str | None = None
    load_serial: int | None = None
    has_begun: bool = False
    losses: int = 0
    reloading: bool = False
    orphaned: bool = False
    drained: bool = False
    retry: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    fetch: ProgressLog | None = None
    wanted_s: float = field(default_factory=time.monotonic)

    @property
    def instance_id(self) -> str:
        return self.desired.instance_id


class HostedInstances:
    """Follows the desired instances of one worker.

    `in_use` tells whether requests of an instance are in flight, `on_change` is called after its state changed.
    `worker_gpus`: a pooled instance runs on all of them. `sources`: rules of remote checkpoints, which a replay fetches
    without weights. `refusal`: why the worker cannot host an instance, None if it can. `hosts`: the other hosts of the
    worker, if it has any.
    """

    def __init__(
        self,
        engine: EngineKind,
        tokenizers: TokenizerCache,
        *,
        worker_gpus: int,
        sources: Sources,
        load_retry_s: float,
        refusal: Callable[[DesiredInstance], str | None],
        in_use: Callable[[str], bool],
        on_change: Callable[[str], None],
        hosts: SlotHosts | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizers = tokenizers
        self._worker_gpus = worker_gpus
        self._sources = sources
        self._load_retry_s = load_retry_s
        self._refusal = refusal
        self._in_use = in_use
        self._on_change = on_change
        self._hosts = hosts
        self._hosted: dict[str, HostedInstance] = {}
        self._send: Callable[[Command], None] | None = None
        """Sends a command to the worker process; None while there is none."""
        self._serial = 0
        self._loads: set[asyncio.Task[None]] = set()

    def get(self, instance_id: str) -> HostedInstance | None:
        """The instance, unless it is unknown or drained."""
        hosted = self._hosted.get(instance_id)
        return None if hosted is None or hosted.drained else hosted

    @property
    def loads(self) -> bool:
        """Whether the process has a load that it has not answered yet."""
        return any(hosted.load_serial is not None for hosted in self._hosted.values())

    def fetches(self) -> dict[str, ProgressLog]:
        """The progress of each checkpoint that is being fetched, by instance."""
        return {hosted.instance_id: hosted.fetch for hosted in self._hosted.values() if hosted.fetch is not None}

    def waits_for(self, instance_id: str) -> str | None:
        """What a loading instance waits for; None for another state."""
        hosted = self.get(instance_id)
        if hosted is None or hosted.state != "loading":
            return None
        if hosted.fetch is not None:
            done, total = hosted.fetch.done_bytes, hosted.fetch.total_bytes
            return f"its checkpoint is fetched: {10 * (10 * done // total)} %" if total else "its checkpoint is fetched"
        if self._hosts is not None and (wait := self._hosts.waits_for(hosted.desired.model.path)) is not None:
            return wait
        if self._send is None:
            return "the worker process is starting"
        if hosted.tokenizer is None:
            return "its tokenizer is read"
        if not self._has_host(hosted):
            return "its base is loaded"
        return "its weights are loaded" if not self._has_former(hosted) else "the former adapter of its name drains"

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Host these instances and no others. One whose model changed is unloaded and loaded again. One whose engine
        changed is unloaded where the worker cannot run that engine, and loaded where it can again.
        """
        wanted = {instance.instance_id: instance for instance in desired}
        for hosted in list(self._hosted.values()):
            replacement = wanted.get(hosted.instance_id)
            if replacement is None or not replacement.model.is_same(hosted.desired.model):
                self._remove(hosted)
        for instance in wanted.values():
            hosted_before = self._hosted.get(instance.instance_id)
            if hosted_before is None:
                self._add(HostedInstance(desired=instance))
            else:
                self._update(hosted_before, instance)

    def worker_ready(self, send: Callable[[Command], None]) -> None:
        """Load the instances into a new process, also those that failed because others died. Where the worker has other
        hosts these are asked again: another may run there now, or have another checkpoint.
        """
        self._send = send
        for hosted in list(self._hosted.values()):
            orphaned = hosted.state == "failed" and hosted.orphaned and hosted.losses <= LOAD_LOSSES_MAX
            was_checked = self._hosts is not None and hosted.state == "loading" and hosted.tokenizer is not None
            if orphaned or (was_checked and not hosted.drained):
                self._load(hosted)
            else:
                self._send_load(hosted)

    def engine_changed(self) -> None:
        """The process ends so that one with another engine can start. Failed instances are tried again, since the
        former engine may have been the reason.
        """
        self.process_ends()
        for hosted in self._hosted.values():
            if hosted.state == "failed" and not hosted.drained:
                self._load(hosted)

    def process_ends(self) -> None:
        """The process is ended on purpose: send it nothing, and count no loss."""
        self._send = None
        for hosted in self._hosted.values():
            hosted.load_serial = None

    def worker_lost(self, end: str, *, host_gone: bool = False) -> None:
        """The process is gone, `end` tells how. The load that it was at may be the cause, and fails the second time: of
        those that had begun the first, since the process executes them in order. `host_gone`: another host's follower
        is gone, which no load causes.
        """
        self._send = None
        loading = [one for one in self._hosted.values() if one.load_serial is not None and one.has_begun]
        suspect = min(loading, key=lambda hosted: hosted.load_serial or 0, default=None)
        for hosted in self._hosted.values():
            hosted.load_serial = None
            if hosted.state in ("ready", "draining"):
                hosted.state, hosted.reloading = "loading", True
                hosted.wanted_s = time.monotonic()
        if suspect is not None and not host_gone:
            suspect.losses += 1
            if suspect.losses > LOAD_LOSSES_MAX:
                error = f"{suspect.losses} worker processes ended while they loaded this model, the last {end}"
                self._fail(suspect, error, orphaned=True)

    def fail_all(self, error: str) -> None:
        """No process can be started: fail each instance that waits for one."""
        for hosted in list(self._hosted.values()):
            if hosted.state == "loading":
                self._fail(hosted, error, orphaned=True)

    def load_stage(self, instance_id: str, serial: int, *, begun: bool) -> None:
        """The worker has begun a load, or put it off."""
        hosted = self._hosted.get(instance_id)
        if hosted is not None and hosted.load_serial == serial:
            hosted.has_begun = begun

    def loaded(self, instance_id: str, serial: int) -> None:
        """The worker has loaded an instance, which takes requests now."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.load_serial != serial or self._send is None:
            return
        hosted.load_serial, hosted.losses, hosted.reloading = None, 0, False
        hosted.state = "draining" if hosted.desired.draining else "ready"
        start_s = round(time.monotonic() - hosted.wanted_s, 2)
        log.info("instance loaded", instance=instance_id, model=hosted.desired.model.name, start_s=start_s)
        self._on_change(instance_id)
        for adapter in self._adapters_of(instance_id):
            self._send_load(adapter)

    def load_failed(self, instance_id: str, serial: int, error: str) -> None:
        """The worker could not load an instance, or has unloaded one that failed later; it is tried again later."""
        hosted = self._hosted.get(instance_id)
        if hosted is not None and (hosted.load_serial == serial or hosted.state in ("ready", "draining")):
            hosted.state, hosted.load_serial = "loading", None  # the worker does not have it
            self._fail(hosted, error)

    def settle(self, instance_id: str) -> None:
        """Unload an instance that drains and has nothing left to do."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.drained or not hosted.desired.draining or self._in_use(instance_id):
            return
        self._give_up(hosted)
        hosted.drained = True
        log.info("instance drained", instance=instance_id)
        self._on_change(instance_id)
        for other in list(self._hosted.values()):
            self._send_load(other)

    def close(self) -> None:
        """Stop all loads and retries."""
        for hosted in self._hosted.values():
            if hosted.retry is not None:
                hosted.retry.cancel()
        for task in self._loads:
            task.cancel()

    def _add(self, hosted: HostedInstance) -> None:
        self._hosted[hosted.instance_id] = hosted
        if hosted.desired.draining:
            hosted.drained = True
        else:
            self._load(hosted)
        self._on_change(hosted.instance_id)

    def _update(self, hosted: HostedInstance, desired: DesiredInstance) -> None:
        changed = hosted.desired.draining != desired.draining
        engine_changed = hosted.desired.model.engine != desired.model.engine
        hosted.desired = desired
        if engine_changed and not hosted.drained:
            self._change_engine(hosted)
        if not changed:
            return
        if hosted.drained:
            self._add(HostedInstance(desired=desired))  # its checkpoint may have to be fetched anew
        elif hosted.state in ("ready", "draining"):
            hosted.state = "draining" if desired.draining else "ready"
        self._on_change(hosted.instance_id)

    def _change_engine(self, hosted: HostedInstance) -> None:
        """Fail the instance where the worker cannot run its new engine. A new process for it loads the instance."""
        refusal = self._refusal(hosted.desired)
        if refusal is not None:
            self._fail(hosted, refusal)
        elif hosted.state == "failed":
            self._load(hosted)

    def _remove(self, hosted: HostedInstance) -> None:
        del self._hosted[hosted.instance_id]
        self._give_up(hosted)
        self._on_change(hosted.instance_id)

    def _give_up(self, hosted: HostedInstance) -> None:
        """Unload the instance, or end its load: others may wait for that."""
        self._release(hosted)
        if hosted.task is not None:
            hosted.task.cancel()

    def _release(self, hosted: HostedInstance) -> None:
        """Unload the instance from the process, if it may be there."""
        if hosted.retry is not None:
            hosted.retry.cancel()
        if self._send is not None and (hosted.load_serial is not None or hosted.state in ("ready", "draining")):
            self._send(Unload(instance_id=hosted.instance_id))
        hosted.load_serial = None

    def _load(self, hosted: HostedInstance) -> None:
        if hosted.retry is not None:
            hosted.retry.cancel()
        hosted.wanted_s = time.monotonic()
        hosted.state, hosted.error, hosted.retry, hosted.orphaned = "loading", None, None, False
        hosted.tokenizer = None  # nothing is sent to the process before this load has read it
        if hosted.task is not None:
            hosted.task.cancel()  # it would end when the instance may be loaded already
        hosted.task = asyncio.get_running_loop().create_task(self._load_tokenizer(hosted))
        self._loads.add(hosted.task)
        hosted.task.add_done_callback(self._loads.discard)

    async def _load_tokenizer(self, hosted: HostedInstance) -> None:
        """Fetch the checkpoint, read the tokenizer and check the parsers, then let the process load the weights."""
        refusal = self._refusal(hosted.desired)
        if refusal is not None:
            self._fail(hosted, refusal)
            return
        try:
            if hosted.desired.model.base is not None:
                files = self._engine != "replay"
                await asyncio.to_thread(check_adapter, hosted.desired.model.path, self._sources, files=files)
            hosted.folder = await self._local_folder(hosted)
            await asyncio.to_thread(read_ahead, Path(hosted.folder))
            hosted.rules = await asyncio.to_thread(read_rules, hosted.desired.model, hosted.folder, self._engine)
            tokenizer = await self._tokenizers.get(hosted.desired.model.checkpoint.path, hosted.folder)
            families_of(hosted.desired.model, tokenizer.template)
            if self._hosts is not None:
                await self._hosts.check(hosted.desired.model.path, Path(hosted.folder))
            hosted.tokenizer = tokenizer
        except ModelLoadError as error:
            self._fail(hosted, error.message)
            return
        except Exception as error:  # nobody awaits this task, so an error must become a failed instance here
            self._fail(hosted, f"{type(error).__name__}: {error}")
            return
        self._send_load(hosted)

    async def _local_folder(self, hosted: HostedInstance) -> str:
        path = hosted.desired.model.checkpoint.path
        if not is_remote(path):
            return str(local_checkpoint(path, self._sources))
        progress = hosted.fetch = ProgressLog(
            path, is_wanted=lambda: self.get(hosted.instance_id) is hosted and hosted.fetch is progress
        )
        weights = self._engine != "replay"
        fetch = partial(local_checkpoint, path, self._sources, progress, weights=weights)
        try:
            return str(await in_own_thread(fetch))
        finally:
            if hosted.fetch is progress:  # not that of the load that overtook this one
                hosted.fetch = None

    def _send_load(self, hosted: HostedInstance) -> None:
        waits = hosted.state == "loading" and hosted.tokenizer is not None and hosted.load_serial is None
        if self._send is None or not waits or self._hosted.get(hosted.instance_id) is not hosted or hosted.drained:
            return
        if not self._has_host(hosted) or self._has_former(hosted):
            return
        self._serial += 1
        hosted.load_serial, hosted.has_begun = self._serial, False
        model = _located(hosted.desired.model, hosted.folder)
        model = msgspec.structs.replace(model, adapters=self._adapter_folders(hosted.desired))
        gpus = hosted.desired.gpus or self._worker_gpus
        self._send(Load(instance_id=hosted.instance_id, serial=self._serial, model=model, gpus=gpus))

    def _adapters_of(self, instance_id: str) -> list[HostedInstance]:
        """The adapters that an instance serves, or is to serve."""
        return [one for one in self._hosted.values() if one.desired.host == instance_id and not one.drained]

    def _adapter_folders(self, host: DesiredInstance) -> tuple[str, ...]:
        """The folders of the adapters that an instance is to serve, now or when it is lent out no more, without those
        that this node must not read.
        """
        folders = []
        for adapter in self._hosted.values():
            if adapter.desired.host != host.instance_id or (adapter.drained and not host.spot):
                continue
            with contextlib.suppress(ModelLoadError):
                self._sources.check_root(adapter.desired.model.path)
                folders.append(adapter.desired.model.path)
        return tuple(folders)

    def _has_host(self, hosted: HostedInstance) -> bool:
        """Whether the instance that serves an adapter is loaded: the worker then adds the adapter to that. True of what
        needs none.
        """
        host = None if hosted.desired.host is None else self.get(hosted.desired.host)
        return hosted.desired.host is None or (host is not None and host.state in ("ready", "draining"))

    def _has_former(self, hosted: HostedInstance) -> bool:
        """Whether an adapter of the same name still drains on its host. The worker knows adapters by their names, and
        would take the numbers of that one for those of this one.
        """
        host, name = hosted.desired.host, hosted.desired.model.name
        others = () if host is None else self._adapters_of(host)
        return any(one.desired.draining and one.desired.model.name == name for one in others if one is not hosted)

    def _fail(self, hosted: HostedInstance, error: str, *, orphaned: bool = False) -> None:
        """Unload the instance, if the process may have it, and try again later."""
        if self.get(hosted.instance_id) is not hosted:
            return
        self._release(hosted)
        log.warning("load failed", instance=hosted.instance_id, model=hosted.desired.model.name, error=error)
        hosted.state, hosted.error, hosted.orphaned = "failed", error, orphaned
        hosted.retry = asyncio.get_running_loop().call_later(self._load_retry_s, self._load, hosted)
        self._on_change(hosted.instance_id)


def _located(model: ModelSpec, folder: str) -> ModelSpec:
    """The model with its checkpoint in a folder of this node. An adapter's own path is one already."""
    if model.base is None:
        return msgspec.structs.replace(model, path=folder)
    return msgspec.structs.replace(model, base=msgspec.structs.replace(model.base, path=folder))
