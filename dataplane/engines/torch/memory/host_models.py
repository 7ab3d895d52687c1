"""Models in host memory: their skeletons, made once and kept, and their weights in run-time layout.

Weights never change, so a host copy is good for ever; when host memory is short, copies of models that nobody uses
right now are given back and read again, on a thread of their own, before the model's next turn. Threads that read only
take: what is given back, the engine's own thread gives, between two steps, once no copy reads it any more.
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

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import pinned
from dataplane.engines.torch.memory.departures import Departures
from dataplane.engines.torch.model.checkpoint import StoredTensor, list_tensors, read_tensors
from dataplane.engines.torch.model.layout import cache_key, match_tensors
from dataplane.engines.torch.model.mapping import as_stored
from dataplane.engines.torch.model.skeleton import PlacedTensor, Skeleton, build_skeleton
from dataplane.memory.events import Event
from dataplane.memory.model_cache import CachedModel, HostMemoryError, ModelCache
from dataplane.protocol.errors import ModelLoadError

log = structlog.get_logger()

READ_AGAIN_S = 0.05
"""How long a model that found no room in host memory waits for its next try."""
TOLD_AFTER_S = 1.0
"""A model that waits for room for so long is worth a line in the log: less is common where models take turns."""


@dataclass(eq=False, kw_only=True)
class HostModel:
    """A model the slot knows. `host` is its weights, flat uint8, or None while host memory has no room for them;
    `fresh` until they have been brought to the device from there. `copies`: of those that read `host`, all that may
    still be under way. `short_since_s`: since when there has been no room, by `time.monotonic`, and whether that
    `is_told`.
    """

    name: str
    folder: Path
    skeleton: Skeleton
    pairs: tuple[tuple[PlacedTensor, StoredTensor], ...]
    key: str
    host: torch.Tensor | None = None
    cached: CachedModel | None = None
    used_s: float = 0.0
    fresh: bool = True
    copies: list[Event] = field(default_factory=list)
    short_since_s: float | None = None
    is_told: bool = False

    def send(self, stream: CopyStream, part: int, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy a part of the weights to a place on the device, after some events."""
        assert self.host is not None, f"{self.name} has no copy in host memory"
        event = stream.submit([Copy(source=self.skeleton.parts[part].of(self.host), target=target)], after)
        self.copies.append(event)
        return event


class HostModels:
    """The models of a slot. The thread that makes this is the engine's; `prepare` may run on others. `leave_rank(name)`
    says how early a model's host copy may leave when host memory is short, None if it may not; `in_use(name)` whether
    an instance of it is loaded. A model that finds no room for `host_wait_max_s` fails.
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
    ) -> None:
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
        self._host_wait_max_s = host_wait_max_s
        self._engine_thread = threading.get_ident()
        self._departures = Departures(device)
        self._room_wanted = False
        self._again_s = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of host memory that hold weights: of the node's cache, or this slot's own."""
        if self._cache is not None:
            return self._cache.used_bytes
        with self._lock:
            return sum(model.host.nbytes for model in self._models.values() if model.host is not None)

    def prepare(self, name: str, folder: Path, *, slabs_max: int) -> HostModel:
        """The model, read into host memory. Harmless when done twice.

        On the engine's thread a model that finds no room is put off, and read before its first turn: room is given
        between two steps, so that this thread would wait for itself.

        Raises:
            ModelLoadError: the folder cannot be used, it is another one than before, the weights exceed `slabs_max`
                slabs or the whole model cache.
            HostMemoryError: on another thread: there is no room now; a later try may find some.
        """
        putting_off = threading.get_ident() == self._engine_thread
        usable = self._usable(name, folder, putting_off=putting_off)
        if usable is not None:
            return usable
        with self._building:
            usable = self._usable(name, folder, putting_off=putting_off)  # another thread may have built it meanwhile
            if usable is not None:
                return usable
            known = self._models.get(name)
            if known is None or known.folder != folder:
                model = self._build(name, folder, slabs_max)
                with self._lock:
                    if known is not None:
                        self._part(known)
                    self._models[name] = model
            else:
                model = known
            try:
                self._read(model)
            except HostMemoryError:
                if not putting_off:
                    raise
            except BaseException:
                self.forget(name)
                raise
        return model

    def _usable(self, name: str, folder: Path, *, putting_off: bool) -> HostModel | None:
        """The model if there is nothing left to prepare.

        Raises:
            ModelLoadError: it is loaded from another folder.
        """
        with self._lock:
            known = self._models.get(name)
        if known is None:
            return None
        if known.folder == folder and (putting_off or known.host is not None or self._in_use(name)):
            return known
        if self._in_use(name):
            raise ModelLoadError(f"{name} is loaded from {known.folder}, not from {folder}")
        return None

    def forget(self, name: str) -> None:
        """Let go of a model and its host copy."""
        with self._lock:
            self._reads.pop(name, None)
            model = self._models.pop(name, None)
            if model is not None:
                self._part(model)

    def ready(self, model: HostModel) -> bool:
        """Whether the weights are in host memory. If not, a thread begins to read them.

        Raises:
            ModelLoadError: reading them failed, or found no room for `host_wait_max_s`; the next call begins anew.
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

    def yield_room(self) -> None:
        """Give back what can be spared, by the engine's thread: one host copy if a model of this slot found no room,
        all of them if another slot of the node did.
        """
        if self._cache is not None:
            if self._room_wanted:
                self._room_wanted = False
                if self._give_back_one(rank_max=1):
                    self._again_s = 0.0
            if self._cache.space_is_requested():
                while self._give_back_one(rank_max=2):
                    pass
        self._departures.settle()

    def close(self) -> None:
        """End the reading thread and let go of everything. Streams are closed before: no copy is under way."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for name in list(self._models):
            self.forget(name)
        self._departures.settle(wait=False)

    def _build(self, name: str, folder: Path, slabs_max: int) -> HostModel:
        skeleton = build_skeleton(folder, self._dtype, self._device)
        slabs = skeleton.slabs(self._slab_bytes)
        if slabs > slabs_max:
            raise ModelLoadError(
                f"{name}: weights of {skeleton.size_bytes} bytes take {slabs} slabs of {self._slab_bytes} bytes;"
                f" weights_bytes of the slot hold {slabs_max}"
            )
        if self._cache is not None and skeleton.size_bytes > self._cache.capacity_bytes:
            limit = f"cache_bytes={self._cache.capacity_bytes}"
            raise ModelLoadError(f"{name}: weights of {skeleton.size_bytes} bytes exceed {limit} of the node")
        stored = list_tensors(folder)
        pairs = match_tensors(folder, as_stored(skeleton.places, stored), stored)
        return HostModel(
            name=name, folder=folder, skeleton=skeleton, pairs=tuple(pairs), key=cache_key(folder, self._dtype, pairs)
        )

    def _read_again(self, model: HostModel) -> None:
        with self._building:
            self._read(model)
        with self._lock:
            if self._models.get(model.name) is not model:  # forgotten meanwhile
                self._part(model)

    def _read(self, model: HostModel) -> None:
        """Raises HostMemoryError when there is no room; it is asked for then."""
        if model.host is not None:
            return
        size_bytes = model.skeleton.size_bytes
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
                self._put_off(model, error)
                raise
            host = torch.frombuffer(cached.view.obj, dtype=torch.uint8)  # torch warns of read-only views
        pinned(host, self._device)
        with self._lock:
            model.host, model.cached, model.fresh, model.short_since_s = host, cached, True, None

    def _put_off(self, model: HostModel, error: HostMemoryError) -> None:
        """Ask this slot and the others for room. A wait is told of once."""
        now_s = time.monotonic()
        if model.short_since_s is None:
            model.short_since_s, model.is_told = now_s, False
        if not model.is_told and now_s - model.short_since_s >= TOLD_AFTER_S:
            model.is_told = True
            log.warning(
                "model put off: no room in host memory",
                model=model.name,
                size_bytes=model.skeleton.size_bytes,
                lack_bytes=error.lack_bytes,
                held_by=error.held,
            )
        self._room_wanted = True
        if self._cache is not None:
            self._cache.request_space()

    def _check_wait(self, model: HostModel, error: HostMemoryError) -> None:
        since_s = model.short_since_s
        if since_s is not None and time.monotonic() - since_s >= self._host_wait_max_s:
            model.short_since_s = None
            limit = f"host_wait_max_s={self._host_wait_max_s:g}"
            raise ModelLoadError(f"no room in host memory for longer than {limit}: {error}") from error

    def _give_back_one(self, *, rank_max: int) -> bool:
        """Let go of the host copy that can best be spared; False when none can."""
        with self._lock:
            held = [(self._leave_rank(m.name), m.used_s, m) for m in self._models.values() if m.cached is not None]
            spare = [(rank, used_s, model) for rank, used_s, model in held if rank is not None and rank <= rank_max]
            if not spare:
                return False
            self._part(min(spare, key=lambda known: known[:2])[2])
            return True

    def _part(self, model: HostModel) -> None:
        """Take a model its host copy, which departs when the engine's thread comes by."""
        with self._lock:
            self._departures.add(model.host, model.cached, model.copies)
            model.host, model.cached, model.copies = None, None, []

    @staticmethod
    def _fill(model: HostModel, host: torch.Tensor) -> None:
        parts = model.skeleton.parts
        read_tensors((stored, place.view(parts[place.part].of(host))) for place, stored in model.pairs)
