"""The instances a slot holds, and the way each is loaded, drained and unloaded.

An instance fails in one of two ways, and its requests in flight fare accordingly:

- a worker lives and says why it cannot load it: the next worker would say the same, so the requests end at once;
- workers die before they could (`START_FAILURES_MAX`) or while they load it (`LOAD_LOSSES_MAX`): the control plane is
  told that it failed and sends nothing new, but whoever kills workers may stop. Its requests wait for the next worker
  as others do that lost theirs, until `worker_wait_max_s` (see `dataplane.agent.worker_groups`).
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import structlog

from dataplane.agent.tokenization import Text, load_text
from dataplane.checkpoints.local import ProgressLog, Sources, in_own_thread, local_checkpoint, read_ahead
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import DesiredInstance, EngineKind, InstanceState
from dataplane.protocol.model_sources import is_remote
from dataplane.worker.frames import Command, Load, Unload

log = structlog.get_logger()

LOAD_LOSSES_MAX = 1
"""Workers that may die while they load an instance before its load counts as failed. It is tried again only after
`load_retry_s`: a model that kills workers must leave the others of its slot time to be served.
"""


@dataclass(kw_only=True)
class HostedInstance:
    """An instance of a slot.

    `folder`: where its checkpoint lies on this node. `asked`: the serial of the Load that the present worker has not
    answered yet. `losses`: workers that died over it in a row. `reloading`: it was ready until its worker was lost.
    `retry`: when a failed load is tried again. `orphaned`: it failed since workers died, not by its own fault.
    `wanted_s`: since when it is to be here, by `time.monotonic`.
    `drained`: unloaded after draining; it only waits to be taken from the desired state, and is not reported. `fetch`:
    how far its checkpoint has come, while that is fetched.
    """

    desired: DesiredInstance
    state: InstanceState = "loading"
    folder: str = ""
    text: Text | None = None
    error: str | None = None
    asked: int | None = None
    losses: int = 0
    reloading: bool = False
    orphaned: bool = False
    drained: bool = False
    retry: asyncio.TimerHandle | None = None
    fetch: ProgressLog | None = None
    wanted_s: float = field(default_factory=time.monotonic)

    @property
    def instance_id(self) -> str:
        """The instance's id."""
        return self.desired.instance_id


class HostedInstances:
    """Follows the desired instances of one slot. `send` reaches the worker; it is None while there is none.

    `in_use` says whether requests of an instance are in flight, `on_change` is called after its state changed. `texts`
    are the tokenizers in use on the node, by path. `worker_gpus`: a pooled instance runs on all of them. Remote
    checkpoints are fetched as `sources` say; a replay, which invents its tokens, needs no weights. `refusal` says why
    the slot cannot hold an instance, None if it can.
    """

    def __init__(
        self,
        engine: EngineKind,
        texts: WeakValueDictionary[str, Text],
        *,
        worker_gpus: int,
        sources: Sources,
        load_retry_s: float,
        refusal: Callable[[DesiredInstance], str | None],
        in_use: Callable[[str], bool],
        on_change: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._worker_gpus = worker_gpus
        self._sources = sources
        self._load_retry_s = load_retry_s
        self._refusal = refusal
        self._in_use = in_use
        self._on_change = on_change
        self._hosted: dict[str, HostedInstance] = {}
        self._send: Callable[[Command], None] | None = None
        self._serial = 0
        self._loads: set[asyncio.Task[None]] = set()

    def get(self, instance_id: str) -> HostedInstance | None:
        """The instance, unless it is unknown or drained."""
        hosted = self._hosted.get(instance_id)
        return None if hosted is None or hosted.drained else hosted

    def fetches(self) -> dict[str, ProgressLog]:
        """How far the checkpoints have come that are being fetched, by instance."""
        return {hosted.instance_id: hosted.fetch for hosted in self._hosted.values() if hosted.fetch is not None}

    def waits_for(self, instance_id: str) -> str | None:
        """What keeps an instance from serving; None: nothing does, or it failed."""
        hosted = self.get(instance_id)
        if hosted is None or hosted.state != "loading":
            return None
        if hosted.fetch is not None:
            done, total = hosted.fetch.done_bytes, hosted.fetch.total_bytes
            return f"its checkpoint is fetched: {10 * (10 * done // total)} %" if total else "its checkpoint is fetched"
        if self._send is None:
            return "the worker process is starting"
        return "its tokenizer is read" if hosted.text is None else "its weights are loaded"

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Hold these instances and no others. One whose model changed is unloaded and loaded anew. One that is to run
        on another engine is let go where the slot refuses that, and tried again where it does no longer.
        """
        wanted = {instance.instance_id: instance for instance in desired}
        for hosted in list(self._hosted.values()):
            replacement = wanted.get(hosted.instance_id)
            if replacement is None or not replacement.model.is_same(hosted.desired.model):
                self._remove(hosted)
        for instance in wanted.values():
            held_before = self._hosted.get(instance.instance_id)
            if held_before is None:
                self._take_in(HostedInstance(desired=instance))
            else:
                self._update(held_before, instance)

    def worker_ready(self, send: Callable[[Command], None]) -> None:
        """A worker is there: load into it all that shall be, what only waited for a worker included."""
        self._send = send
        for hosted in list(self._hosted.values()):
            if hosted.state == "failed" and hosted.orphaned and hosted.losses <= LOAD_LOSSES_MAX:
                self._load(hosted)
            else:
                self._ask_load(hosted)

    def engine_changed(self) -> None:
        """The worker makes way for another engine: ask nothing more of it, and blame nothing for its end. What failed
        may have been refused for the engine.
        """
        self._send = None
        for hosted in self._hosted.values():
            hosted.asked = None
            if hosted.state == "failed" and not hosted.drained:
                self._load(hosted)

    def worker_lost(self, end: str) -> None:
        """The worker is gone, `end` says how. What it was loading may be the cause: the second time that has failed."""
        self._send = None
        asked = [hosted for hosted in self._hosted.values() if hosted.asked is not None]
        suspect = min(asked, key=lambda hosted: hosted.asked or 0, default=None)
        for hosted in self._hosted.values():
            hosted.asked = None
            if hosted.state == "ready":
                hosted.state, hosted.reloading = "loading", True
        if suspect is not None:
            suspect.losses += 1
            if suspect.losses > LOAD_LOSSES_MAX:
                error = f"{suspect.losses} worker processes ended while they loaded this model, the last {end}"
                self._fail(suspect, error, orphaned=True)

    def fail_all(self, error: str) -> None:
        """No worker can be started: say so for each instance that waits for one."""
        for hosted in list(self._hosted.values()):
            if hosted.state == "loading":
                self._fail(hosted, error, orphaned=True)

    def loaded(self, instance_id: str, serial: int) -> None:
        """The worker loaded an instance: let it take requests."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.asked != serial or self._send is None:
            return
        hosted.asked, hosted.losses, hosted.reloading = None, 0, False
        hosted.state = "draining" if hosted.desired.draining else "ready"
        start_s = round(time.monotonic() - hosted.wanted_s, 2)
        log.info("instance loaded", instance=instance_id, model=hosted.desired.model.name, start_s=start_s)
        self._on_change(instance_id)

    def load_failed(self, instance_id: str, serial: int, error: str) -> None:
        """The worker could not load an instance; it is tried again later."""
        hosted = self._hosted.get(instance_id)
        if hosted is not None and hosted.asked == serial:
            self._fail(hosted, error)

    def settle(self, instance_id: str) -> None:
        """Unload an instance that drains and has nothing left to do."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.drained or not hosted.desired.draining or self._in_use(instance_id):
            return
        self._release(hosted)
        hosted.drained = True
        log.info("instance drained", instance=instance_id)
        self._on_change(instance_id)

    def close(self) -> None:
        """Start nothing more."""
        for hosted in self._hosted.values():
            if hosted.retry is not None:
                hosted.retry.cancel()
        for task in self._loads:
            task.cancel()

    def _take_in(self, hosted: HostedInstance) -> None:
        self._hosted[hosted.instance_id] = hosted
        if hosted.desired.draining:
            hosted.drained = True
        else:
            self._load(hosted)
        self._on_change(hosted.instance_id)

    def _update(self, hosted: HostedInstance, desired: DesiredInstance) -> None:
        changed = hosted.desired.draining != desired.draining
        elsewhere = hosted.desired.model.engine != desired.model.engine
        hosted.desired = desired
        if elsewhere and not hosted.drained:
            self._try_engine(hosted)
        if not changed:
            return
        if hosted.drained:
            self._take_in(HostedInstance(desired=desired, text=hosted.text))
        elif hosted.state in ("ready", "draining"):
            hosted.state = "draining" if desired.draining else "ready"
        self._on_change(hosted.instance_id)

    def _try_engine(self, hosted: HostedInstance) -> None:
        """Another engine is wanted. Where it takes a new worker, that one loads the instance as any new worker does."""
        refusal = self._refusal(hosted.desired)
        if refusal is not None:
            self._release(hosted)
            self._fail(hosted, refusal)
        elif hosted.state == "failed":
            self._load(hosted)

    def _remove(self, hosted: HostedInstance) -> None:
        del self._hosted[hosted.instance_id]
        self._release(hosted)
        self._on_change(hosted.instance_id)

    def _release(self, hosted: HostedInstance) -> None:
        """Have the worker forget the instance, if it may know it."""
        if hosted.retry is not None:
            hosted.retry.cancel()
        if self._send is not None and (hosted.asked is not None or hosted.state in ("ready", "draining")):
            self._send(Unload(instance_id=hosted.instance_id))
        hosted.asked = None

    def _load(self, hosted: HostedInstance) -> None:
        if hosted.retry is not None:
            hosted.retry.cancel()
        hosted.state, hosted.error, hosted.retry, hosted.orphaned = "loading", None, None, False
        task = asyncio.get_running_loop().create_task(self._load_text(hosted))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load_text(self, hosted: HostedInstance) -> None:
        """Fetch the checkpoint and read the tokenizer, off the loop, then let the worker read the weights."""
        path = hosted.desired.model.path
        refusal = self._refusal(hosted.desired)
        if refusal is not None:
            self._fail(hosted, refusal)
            return
        try:
            hosted.folder = await self._local_folder(hosted)
            text = hosted.text or self._texts.get(path)
            await asyncio.to_thread(read_ahead, Path(hosted.folder))
            if text is None:
                text = await asyncio.to_thread(load_text, hosted.folder, self._engine)
        except ModelLoadError as error:
            self._fail(hosted, error.message)
            return
        except Exception as error:  # nobody awaits this task: what is not told here is told nowhere
            self._fail(hosted, f"{type(error).__name__}: {error}")
            return
        hosted.text = self._texts.setdefault(path, text)
        self._ask_load(hosted)

    async def _local_folder(self, hosted: HostedInstance) -> str:
        path = hosted.desired.model.path
        if not is_remote(path):
            return str(local_checkpoint(path, self._sources))
        hosted.fetch = ProgressLog(path, is_wanted=lambda: self.get(hosted.instance_id) is hosted)
        weights = self._engine != "replay"
        fetch = partial(local_checkpoint, path, self._sources, hosted.fetch, weights=weights)
        try:
            return str(await in_own_thread(fetch))
        finally:
            hosted.fetch = None

    def _ask_load(self, hosted: HostedInstance) -> None:
        waits = hosted.state in ("loading", "draining") and hosted.text is not None and hosted.asked is None
        if self._send is None or not waits or self._hosted.get(hosted.instance_id) is not hosted or hosted.drained:
            return
        self._serial += 1
        hosted.asked = self._serial
        model = msgspec.structs.replace(hosted.desired.model, path=hosted.folder)
        gpus = hosted.desired.gpus or self._worker_gpus
        self._send(Load(instance_id=hosted.instance_id, serial=self._serial, model=model, gpus=gpus))

    def _fail(self, hosted: HostedInstance, error: str, *, orphaned: bool = False) -> None:
        if self.get(hosted.instance_id) is not hosted:
            return
        log.warning("load failed", instance=hosted.instance_id, model=hosted.desired.model.name, error=error)
        hosted.state, hosted.error, hosted.asked, hosted.orphaned = "failed", error, None, orphaned
        hosted.retry = asyncio.get_running_loop().call_later(self._load_retry_s, self._load, hosted)
        self._on_change(hosted.instance_id)
