"""Models in host memory: their skeletons, built once and kept, and their weights in run-time layout.

Weights never change, so a host copy stays valid. When host memory is short, copies of models that are not in use are
released, and read again by a reading thread before the model's next turn. Reading threads only allocate; only the
engine's thread releases, between two steps, once no copy reads the memory any more.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import structlog
import torch

from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import pinned
from dataplane.engines.torch.memory.releases import PendingReleases
from dataplane.engines.torch.model.checkpoint import list_tensors
from dataplane.engines.torch.model.layout import cache_key, match_tensors, read_weights
from dataplane.engines.torch.model.mapping import as_stored
from dataplane.engines.torch.model.pooling import Pooler, make_pooler
from dataplane.engines.torch.model.skeleton import PlacedTensor, Skeleton, build_skeleton
from dataplane.engines.torch.ranks.leader import Leader
from dataplane.memory.events import Event
from dataplane.memory.model_cache import CachedModel, HostMemoryError, ModelCache
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

log = structlog.get_logger()

READ_AGAIN_S = 0.05
"""How long a model that found no host memory waits for its next attempt."""
WARN_AFTER_S = 1.0
"""A wait for host memory that is worth a log line: shorter ones are common where models take turns."""


@dataclass(eq=False, kw_only=True)
class HostModel:
    """A model of the slot. `host`: its weights, flat uint8, or None while they are not in host memory; `fresh` until
    they have been loaded to the device from there. `copies`: the transfers that read `host`, all that may still be
    under way, and that other ranks map its file. `pooler`: makes the answers of a model that does not generate.
    The thread that reads it has `reading`. `short_since_s`: since when host memory has been short, by `time.monotonic`,
    and whether that `is_logged`.
    """

    name: str
    folder: Path
    skeleton: Skeleton
    pairs: tuple[tuple[PlacedTensor, StoredTensor], ...]
    key: str
    pooler: Pooler | None = None
    host: torch.Tensor | None = None
    cached: CachedModel | None = None
    used_s: float = 0.0
    fresh: bool = True
    copies: list[Event] = field(default_factory=list)
    reading: threading.Lock = field(default_factory=threading.Lock)
    short_since_s: float | None = None
    is_logged: bool = False

    def send(self, stream: CopyStream, shard: int, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy a shard of the weights to `target` on the device, after some events."""
        assert self.host is not None, f"{self.name} has no copy in host memory"
        event = stream.submit([Copy(source=self.skeleton.shards[shard].of(self.host), target=target)], after)
        self.copies.append(event)
        return event


class HostModels:
    """The models of a slot. The thread that constructs this is the engine's; `prepare` may run on others.
    `leave_rank(name)`: how early a model's host copy may be released when host memory is short, None if it may not;
    `in_use(name)`: whether an instance of it is loaded. A model that finds no memory for `host_wait_max_s` fails.

    On a slot of several ranks `leader` tells the others. A host copy is then a file of the node's cache with the parts
    of all ranks, which this process reads and each of them maps.
    """

    def __init__(
        self,
        cache: ModelCache | None,
        dtype: torch.dtype,
        device: torch.device,
        slab_bytes: int,
        *,
        leave_rank: Callable[[str], int | None],
        in_use: Callable[[str], bool],
        host_wait_max_s: float = inf,
        leader: Leader | None = None,
    ) -> None:
        assert cache is not None or leader is None, "ranks share host copies by way of the node's cache"
        self._leader = leader
        self._ranks = 1 if leader is None else leader.rank.count
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._slab_bytes = slab_bytes
        self._models: dict[str, HostModel] = {}
        self._reads: dict[str, Future[None]] = {}
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="host-models")
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._leave_rank = leave_rank
        self._in_use = in_use
        self.host_wait_max_s = host_wait_max_s
        self._engine_thread = threading.get_ident()
        self._releases = PendingReleases(device)
        self._memory_wanted = False
        self._again_s = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of host memory that hold weights: of the node's cache, or this slot's own."""
        if self._cache is not None:
            return self._cache.used_bytes
        with self._lock:
            return sum(model.host.nbytes for model in self._models.values() if model.host is not None)

    def prepare(self, name: str, folder: Path, *, slabs_max: int, task: Task = "generate") -> HostModel:
        """The model, read into host memory. Idempotent.

        On the engine's thread a model that finds no memory is postponed, and read before its first turn: memory is
        released between two steps, so that this thread would wait for itself.

        Raises:
            ModelLoadError: the folder cannot be used or is not the model's, or the weights exceed `slabs_max` slabs or
                the whole model cache.
            HostMemoryError: on another thread: host memory is full now; a later attempt may succeed.
        """
        postpones = threading.get_ident() == self._engine_thread
        usable = self._usable(name, folder, task, postpones=postpones)
        if usable is not None:
            return usable
        with self._building:
            usable = self._usable(name, folder, task, postpones=postpones)  # another thread may have built it meanwhile
            if usable is not None:
                return usable
            known = self._models.get(name)
            if known is None or not self.has(name, folder, task):
                model = self._build(name, folder, slabs_max, task)
                with self._lock:
                    if known is not None:
                        self.forget(name)
                    self._models[name] = model
            else:
                model = known
            try:
                with model.reading:
                    self._read(model)
            except HostMemoryError:
                if not postpones:
                    raise
            except BaseException:
                self.forget(name)
                raise
        return model

    def has(self, name: str, folder: Path, task: Task) -> bool:
        """Whether the model is known: if its weights are not in host memory, a thread reads them before its turn."""
        with self._lock:
            known = self._models.get(name)
        return known is not None and (known.folder, known.skeleton.task) == (folder, task)

    def _usable(self, name: str, folder: Path, task: Task, *, postpones: bool) -> HostModel | None:
        """The model if it is prepared.

        Raises:
            ModelLoadError: it is loaded from another folder, or for another task.
        """
        with self._lock:
            known = self._models.get(name)
        if known is None:
            return None
        if self.has(name, folder, task) and (postpones or known.host is not None or self._in_use(name)):
            return known
        if self._in_use(name):
            here, wanted = f"{known.folder} to {known.skeleton.task}", f"{folder} to {task}"
            raise ModelLoadError(f"{name} is loaded from {here}, not from {wanted}")
        return None

    def forget(self, name: str) -> None:
        """Remove a model and release its host copy."""
        with self._lock:
            self._reads.pop(name, None)
            model = self._models.pop(name, None)
            if model is not None:
                self.release_copy(model)
                if model.skeleton.mirror is not None:
                    model.skeleton.mirror.forget()

    def ready(self, model: HostModel) -> bool:
        """Whether the weights are in host memory. If not, a thread starts to read them.

        Raises:
            ModelLoadError: reading failed, or found no memory for `host_wait_max_s`; the next call starts over.
        """
        if model.host is not None:
            return True
        read = self._reads.get(model.name)
        if read is None and time.monotonic() >= self._again_s:
            self._reads[model.name] = self._readers.submit(self._read_again, model)
        elif read is not None and read.done():
            del self._reads[model.name]
            try:
                read.result()
            except HostMemoryError as error:
                self._again_s = time.monotonic() + READ_AGAIN_S
                self._check_wait(model, error)
        return model.host is not None

    def release_spare(self) -> None:
        """Release host copies that can be spared, on the engine's thread: one if a model of this slot found no memory,
        all of them if another slot of the node did.
        """
        if self._cache is not None:
            if self._memory_wanted:
                self._memory_wanted = False
                if self._release_one(rank_max=1):
                    self._again_s = 0.0
            if self._cache.space_is_requested():
                while self._release_one(rank_max=2):
                    pass
        self._releases.settle()

    def close(self) -> None:
        """End the reading thread and release everything. Streams are closed before: no copy is under way."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for name in list(self._models):
            self.forget(name)
        self._releases.settle(wait=False)

    def _build(self, name: str, folder: Path, slabs_max: int, task: Task) -> HostModel:
        rank = None if self._leader is None else self._leader.rank
        skeleton = build_skeleton(folder, self._dtype, self._device, task, rank)
        pooler = make_pooler(skeleton, folder)
        slabs = skeleton.slabs(self._slab_bytes)
        if slabs > slabs_max:
            raise ModelLoadError(
                f"{name}: weights of {skeleton.size_bytes} bytes take {slabs} slabs of {self._slab_bytes} bytes;"
                f" weights_bytes of the slot hold {slabs_max}"
            )
        host_bytes = self._ranks * skeleton.size_bytes
        if self._cache is not None and host_bytes > self._cache.capacity_bytes:
            limit = f"cache_bytes={self._cache.capacity_bytes}"
            raise ModelLoadError(f"{name}: weights of {host_bytes} bytes exceed {limit} of the node")
        stored = list_tensors(folder, task)
        pairs = match_tensors(folder, as_stored(skeleton.places_to_read, stored), stored)
        if self._leader is not None:
            skeleton.mirror = self._leader.build(skeleton, folder)
        return HostModel(
            name=name,
            folder=folder,
            skeleton=skeleton,
            pairs=tuple(pairs),
            key=cache_key(folder, skeleton, pairs),
            pooler=pooler,
        )

    def _read_again(self, model: HostModel) -> None:
        with model.reading:  # not `_building`: another model may be read for minutes there
            self._read(model)
        with self._lock:
            if self._models.get(model.name) is not model:  # forgotten meanwhile
                self.release_copy(model)

    def _read(self, model: HostModel) -> None:
        """The caller has `model.reading`. Raises HostMemoryError if host memory is full, and requests memory then."""
        if model.host is not None:
            return
        size_bytes = self._ranks * model.skeleton.size_bytes
        cached = None
        if self._cache is None:
            host = torch.empty(size_bytes, dtype=torch.uint8)
            self._fill(model, host)
        else:
            try:
                cached = self._cache.acquire(
                    model.key, size_bytes, lambda view: self._fill(model, torch.frombuffer(view, dtype=torch.uint8))
                )
            except HostMemoryError as error:
                self._request_memory(model, error)
                raise
            whole = torch.frombuffer(cached.view.obj, dtype=torch.uint8)  # torch warns of read-only views
            host = whole[: model.skeleton.size_bytes]
        pinned(host, self._device)
        mirror = model.skeleton.mirror
        held = [mirror.hold(host, cached.path)] if mirror is not None and cached is not None else []
        with self._lock:
            model.host, model.cached, model.fresh, model.short_since_s = host, cached, True, None
            model.copies = held

    def _request_memory(self, model: HostModel, error: HostMemoryError) -> None:
        """Request eviction on this and other slots. The warning is logged once per wait."""
        now_s = time.monotonic()
        if model.short_since_s is None:
            model.short_since_s, model.is_logged = now_s, False
        if not model.is_logged and now_s - model.short_since_s >= WARN_AFTER_S:
            model.is_logged = True
            log.warning(
                "model postponed: host memory is full",
                model=model.name,
                size_bytes=model.skeleton.size_bytes,
                lack_bytes=error.lack_bytes,
                held_by=error.held,
            )
        self._memory_wanted = True
        if self._cache is not None:
            self._cache.request_space()

    def _check_wait(self, model: HostModel, error: HostMemoryError) -> None:
        since_s = model.short_since_s
        if since_s is not None and time.monotonic() - since_s >= self.host_wait_max_s:
            model.short_since_s = None
            limit = f"host_wait_max_s={self.host_wait_max_s:g}"
            raise ModelLoadError(f"host memory was full for longer than {limit}: {error}") from error

    def _release_one(self, *, rank_max: int) -> bool:
        """Release the host copy that can best be spared; False if none can."""
        with self._lock:
            held = [(self._leave_rank(m.name), m.used_s, m) for m in self._models.values() if m.cached is not None]
            spare = [(rank, used_s, model) for rank, used_s, model in held if rank is not None and rank <= rank_max]
            if not spare:
                return False
            self.release_copy(min(spare, key=lambda known: known[:2])[2])
            return True

    def release_copy(self, model: HostModel) -> None:
        """Detach the model's host copy; the engine's thread frees it."""
        with self._lock:
            self._releases.add(model.host, model.cached, model.copies)
            if model.skeleton.mirror is not None and model.host is not None:
                model.skeleton.mirror.release()
            model.host, model.cached, model.copies = None, None, []

    def _fill(self, model: HostModel, host: torch.Tensor) -> None:
        """Read the parts of all ranks.

        Raises:
            ModelLoadError: a file cannot be read, or is another one than when the model was built: its KV is of the
                former weights, and the node's other slots know those by the same key.
        """
        _check_unchanged(model)
        read_weights(model.pairs, model.skeleton, torch.split(host, model.skeleton.size_bytes))
        _check_unchanged(model)


def _check_unchanged(model: HostModel) -> None:
    try:
        key = cache_key(model.folder, model.skeleton, model.pairs)
    except OSError as error:
        raise ModelLoadError(f"a checkpoint file cannot be read: {error}") from error
    if key != model.key:
        raise ModelLoadError(f"{model.folder}: the checkpoint changed since it was loaded")
