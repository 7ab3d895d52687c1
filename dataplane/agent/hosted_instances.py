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
class HeldInstance:
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


class HeldInstances:
    """Follows the desired instances of one slot. `send` reaches the worker; it is None while there is none.

    `in_use` says whether requests of an instance are in flight, `on_change` is called after its state changed. `texts`
    are the tokenizers in use on the node, by path. `slot_gpus`: a pooled instance runs on all of them. Remote
    checkpoints are fetched as `sources` say; a replay, which invents its tokens, needs no weights. `refusal` says why
    the slot cannot hold an instance, None if it can.
    """

    def __init__(
        self,
        engine: EngineKind,
        texts: WeakValueDictionary[str, Text],
        *,
        slot_gpus: int,
        sources: Sources,
        load_retry_s: float,
        refusal: Callable[[DesiredInstance], str | None],
        in_use: Callable[[str], bool],
        on_change: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._slot_gpus = slot_gpus
        self._sources = sources
        self._load_retry_s = load_retry_s
        self._refusal = refusal
        self._in_use = in_use
        self._on_change = on_change
        self._held: dict[str, HeldInstance] = {}
        self._send: Callable[[Command], None] | None = None
        self._serial = 0
        self._loads: set[asyncio.Task[None]] = set()

    def get(self, instance_id: str) -> HeldInstance | None:
        """The instance, unless it is unknown or drained."""
        held = self._held.get(instance_id)
        return None if held is None or held.drained else held

    def fetches(self) -> dict[str, ProgressLog]:
        """How far the checkpoints have come that are being fetched, by instance."""
        return {held.instance_id: held.fetch for held in self._held.values() if held.fetch is not None}

    def waits_for(self, instance_id: str) -> str | None:
        """What keeps an instance from serving; None: nothing does, or it failed."""
        held = self.get(instance_id)
        if held is None or held.state != "loading":
            return None
        if held.fetch is not None:
            done, total = held.fetch.done_bytes, held.fetch.total_bytes
            return f"its checkpoint is fetched: {10 * (10 * done // total)} %" if total else "its checkpoint is fetched"
        if self._send is None:
            return "the worker process is starting"
        return "its tokenizer is read" if held.text is None else "its weights are loaded"

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Hold these instances and no others. One whose model changed is unloaded and loaded anew. One that is to run
        on another engine is let go where the slot refuses that, and tried again where it does no longer.
        """
        wanted = {instance.instance_id: instance for instance in desired}
        for held in list(self._held.values()):
            replacement = wanted.get(held.instance_id)
            if replacement is None or not replacement.model.is_same(held.desired.model):
                self._remove(held)
        for instance in wanted.values():
            held_before = self._held.get(instance.instance_id)
            if held_before is None:
                self._take_in(HeldInstance(desired=instance))
            else:
                self._update(held_before, instance)

    def worker_ready(self, send: Callable[[Command], None]) -> None:
        """A worker is there: load into it all that shall be, what only waited for a worker included."""
        self._send = send
        for held in list(self._held.values()):
            if held.state == "failed" and held.orphaned and held.losses <= LOAD_LOSSES_MAX:
                self._load(held)
            else:
                self._ask_load(held)

    def engine_changed(self) -> None:
        """The worker makes way for another engine: ask nothing more of it, and blame nothing for its end. What failed
        may have been refused for the engine.
        """
        self._send = None
        for held in self._held.values():
            held.asked = None
            if held.state == "failed" and not held.drained:
                self._load(held)

    def worker_lost(self, end: str) -> None:
        """The worker is gone, `end` says how. What it was loading may be the cause: the second time that has failed."""
        self._send = None
        asked = [held for held in self._held.values() if held.asked is not None]
        suspect = min(asked, key=lambda held: held.asked or 0, default=None)
        for held in self._held.values():
            held.asked = None
            if held.state == "ready":
                held.state, held.reloading = "loading", True
        if suspect is not None:
            suspect.losses += 1
            if suspect.losses > LOAD_LOSSES_MAX:
                error = f"{suspect.losses} worker processes ended while they loaded this model, the last {end}"
                self._fail(suspect, error, orphaned=True)

    def fail_all(self, error: str) -> None:
        """No worker can be started: say so for each instance that waits for one."""
        for held in list(self._held.values()):
            if held.state == "loading":
                self._fail(held, error, orphaned=True)

    def loaded(self, instance_id: str, serial: int) -> None:
        """The worker loaded an instance: let it take requests."""
        held = self._held.get(instance_id)
        if held is None or held.asked != serial or self._send is None:
            return
        held.asked, held.losses, held.reloading = None, 0, False
        held.state = "draining" if held.desired.draining else "ready"
        start_s = round(time.monotonic() - held.wanted_s, 2)
        log.info("instance loaded", instance=instance_id, model=held.desired.model.name, start_s=start_s)
        self._on_change(instance_id)

    def load_failed(self, instance_id: str, serial: int, error: str) -> None:
        """The worker could not load an instance; it is tried again later."""
        held = self._held.get(instance_id)
        if held is not None and held.asked == serial:
            self._fail(held, error)

    def settle(self, instance_id: str) -> None:
        """Unload an instance that drains and has nothing left to do."""
        held = self._held.get(instance_id)
        if held is None or held.drained or not held.desired.draining or self._in_use(instance_id):
            return
        self._release(held)
        held.drained = True
        log.info("instance drained", instance=instance_id)
        self._on_change(instance_id)

    def close(self) -> None:
        """Start nothing more."""
        for held in self._held.values():
            if held.retry is not None:
                held.retry.cancel()
        for task in self._loads:
            task.cancel()

    def _take_in(self, held: HeldInstance) -> None:
        self._held[held.instance_id] = held
        if held.desired.draining:
            held.drained = True
        else:
            self._load(held)
        self._on_change(held.instance_id)

    def _update(self, held: HeldInstance, desired: DesiredInstance) -> None:
        changed = held.desired.draining != desired.draining
        elsewhere = held.desired.model.engine != desired.model.engine
        held.desired = desired
        if elsewhere and not held.drained:
            self._try_engine(held)
        if not changed:
            return
        if held.drained:
            self._take_in(HeldInstance(desired=desired, text=held.text))
        elif held.state in ("ready", "draining"):
            held.state = "draining" if desired.draining else "ready"
        self._on_change(held.instance_id)

    def _try_engine(self, held: HeldInstance) -> None:
        """Another engine is wanted. Where it takes a new worker, that one loads the instance as any new worker does."""
        refusal = self._refusal(held.desired)
        if refusal is not None:
            self._release(held)
            self._fail(held, refusal)
        elif held.state == "failed":
            self._load(held)

    def _remove(self, held: HeldInstance) -> None:
        del self._held[held.instance_id]
        self._release(held)
        self._on_change(held.instance_id)

    def _release(self, held: HeldInstance) -> None:
        """Have the worker forget the instance, if it may know it."""
        if held.retry is not None:
            held.retry.cancel()
        if self._send is not None and (held.asked is not None or held.state in ("ready", "draining")):
            self._send(Unload(instance_id=held.instance_id))
        held.asked = None

    def _load(self, held: HeldInstance) -> None:
        if held.retry is not None:
            held.retry.cancel()
        held.state, held.error, held.retry, held.orphaned = "loading", None, None, False
        task = asyncio.get_running_loop().create_task(self._load_text(held))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load_text(self, held: HeldInstance) -> None:
        """Fetch the checkpoint and read the tokenizer, off the loop, then let the worker read the weights."""
        path = held.desired.model.path
        refusal = self._refusal(held.desired)
        if refusal is not None:
            self._fail(held, refusal)
            return
        try:
            held.folder = await self._local_folder(held)
            text = held.text or self._texts.get(path)
            await asyncio.to_thread(read_ahead, Path(held.folder))
            if text is None:
                text = await asyncio.to_thread(load_text, held.folder, self._engine)
        except ModelLoadError as error:
            self._fail(held, error.message)
            return
        except Exception as error:  # nobody awaits this task: what is not told here is told nowhere
            self._fail(held, f"{type(error).__name__}: {error}")
            return
        held.text = self._texts.setdefault(path, text)
        self._ask_load(held)

    async def _local_folder(self, held: HeldInstance) -> str:
        path = held.desired.model.path
        if not is_remote(path):
            return str(local_checkpoint(path, self._sources))
        held.fetch = ProgressLog(path, is_wanted=lambda: self.get(held.instance_id) is held)
        weights = self._engine != "replay"
        fetch = partial(local_checkpoint, path, self._sources, held.fetch, weights=weights)
        try:
            return str(await in_own_thread(fetch))
        finally:
            held.fetch = None

    def _ask_load(self, held: HeldInstance) -> None:
        waits = held.state in ("loading", "draining") and held.text is not None and held.asked is None
        if self._send is None or not waits or self._held.get(held.instance_id) is not held or held.drained:
            return
        self._serial += 1
        held.asked = self._serial
        model = msgspec.structs.replace(held.desired.model, path=held.folder)
        gpus = held.desired.gpus or self._slot_gpus
        self._send(Load(instance_id=held.instance_id, serial=self._serial, model=model, gpus=gpus))

    def _fail(self, held: HeldInstance, error: str, *, orphaned: bool = False) -> None:
        if self.get(held.instance_id) is not held:
            return
        log.warning("load failed", instance=held.instance_id, model=held.desired.model.name, error=error)
        held.state, held.error, held.asked, held.orphaned = "failed", error, None, orphaned
        held.retry = asyncio.get_running_loop().call_later(self._load_retry_s, self._load, held)
        self._on_change(held.instance_id)
