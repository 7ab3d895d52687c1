"""Models in host memory: their skeletons, made once and kept, and their weights in run-time layout.

Weights never change, so a host copy is good for ever; when host memory is short, copies of models that nobody uses
right now are given back and read again, on a thread of their own, before the model's next turn.
"""

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.engines.torch.checkpoint import StoredTensor, list_tensors, read_tensors
from dataplane.engines.torch.mapping import as_stored
from dataplane.engines.torch.skeleton import PlacedTensor, Skeleton, build_skeleton
from dataplane.engines.torch.streams import pinned, unpinned
from dataplane.errors import ModelLoadError
from dataplane.memory.model_cache import CachedModel, HostMemoryError, ModelCache

READ_AGAIN_S = 0.05
"""How long a model waits that found no room in host memory."""
LAYOUT_VERSION = 1
"""Part of a cache key: raise it when bytes are laid out differently."""
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Old checkpoints store these; they follow from the config."""


@dataclass(eq=False, kw_only=True)
class HostModel:
    """A model the slot knows. `host` is its weights, flat uint8, or None while host memory has no room for them;
    `fresh` until they have been brought to the device from there.
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


class HostModels:
    """The models of a slot. `prepare` may run on another thread than the rest. `leave_rank(name)` says how early a
    model's host copy may leave when host memory is short, None if it may not; `in_use(name)`
    whether an instance of it is loaded.
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
        self._again_s = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of host memory that hold weights: of the node's cache, or this slot's own."""
        if self._cache is not None:
            return self._cache.used_bytes
        with self._lock:
            return sum(model.host.nbytes for model in self._models.values() if model.host is not None)

    def prepare(self, name: str, folder: Path, *, slabs_max: int) -> HostModel:
        """The model, read into host memory if it is not there and there is room. Harmless when done twice.

        Raises:
            ModelLoadError: the folder cannot be used, it is another one than before, the weights exceed `slabs_max`
                slabs or the whole model cache.
        """
        with self._lock:
            known = self._models.get(name)
        if known is not None and known.folder == folder:
            return known
        if known is not None and self._in_use(name):
            raise ModelLoadError(f"{name} is loaded from {known.folder}, not from {folder}")
        with self._building:
            model = self._build(name, folder, slabs_max)
            size_bytes = model.skeleton.size_bytes
            if self._cache is not None and size_bytes > self._cache.capacity_bytes:
                limit = self._cache.capacity_bytes
                raise ModelLoadError(f"{name}: weights of {size_bytes} bytes exceed cache_bytes={limit} of the node")
            with suppress(HostMemoryError):  # full just now: its turn comes when there is room again
                self._read(model)
        with self._lock:
            if known is not None:
                self._release(known)
            self._models[name] = model
        return model

    def forget(self, name: str) -> None:
        """Let go of a model and its host copy."""
        with self._lock:
            self._reads.pop(name, None)
            model = self._models.pop(name, None)
            if model is not None:
                self._release(model)

    def ready(self, model: HostModel) -> bool:
        """Whether the weights are in host memory. If not, a thread begins to read them.

        Raises:
            ModelLoadError: reading them failed; the next call tries again.
        """
        if model.host is not None:
            return True
        read = self._reads.get(model.name)
        if read is None and time.monotonic() >= self._again_s:
            self._reads[model.name] = self._readers.submit(self._read_again, model)
        elif read is not None and read.done():
            del self._reads[model.name]
            read.result()
            if model.host is None:
                self._again_s = time.monotonic() + READ_AGAIN_S
        return model.host is not None

    def close(self) -> None:
        """End the reading thread and let go of everything."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for name in list(self._models):
            self.forget(name)

    def _build(self, name: str, folder: Path, slabs_max: int) -> HostModel:
        skeleton = build_skeleton(folder, self._dtype, self._device)
        slabs = skeleton.slabs(self._slab_bytes)
        if slabs > slabs_max:
            raise ModelLoadError(
                f"{name}: weights of {skeleton.size_bytes} bytes take {slabs} slabs of {self._slab_bytes} bytes;"
                f" weights_bytes of the slot hold {slabs_max}"
            )
        stored = list_tensors(folder)
        pairs = match_tensors(folder, as_stored(skeleton.places, stored), stored)
        return HostModel(
            name=name, folder=folder, skeleton=skeleton, pairs=tuple(pairs), key=_cache_key(folder, self._dtype, pairs)
        )

    def _read_again(self, model: HostModel) -> None:
        """What `prepare` could read once must not fail for want of memory now: it is tried again."""
        with self._building, suppress(HostMemoryError):
            self._read(model)
        with self._lock:
            if self._models.get(model.name) is not model:  # forgotten meanwhile
                self._release(model)

    def _read(self, model: HostModel) -> None:
        """Raises HostMemoryError when no room can be made."""
        size_bytes = model.skeleton.size_bytes
        if self._cache is None:
            host = torch.empty(size_bytes, dtype=torch.uint8)
            self._fill(model, host)
            model.host, model.fresh = pinned(host, self._device), True
            return
        while model.cached is None:
            try:
                model.cached = self._cache.acquire(
                    model.key, size_bytes, lambda view: self._fill(model, torch.frombuffer(view, dtype=torch.uint8))
                )
            except HostMemoryError:
                if not self._give_back_one(rank_max=1):
                    self._cache.want_room()
                    raise
        host = torch.frombuffer(model.cached.view.obj, dtype=torch.uint8)  # torch warns of read-only views
        model.host, model.fresh = pinned(host, self._device), True

    def yield_room(self) -> None:
        """Let go of every host copy that can be spared, if another slot of the node has no room for one it needs."""
        if self._cache is not None and self._cache.room_is_wanted():
            while self._give_back_one(rank_max=2):
                pass

    def _give_back_one(self, *, rank_max: int) -> bool:
        """Let go of the host copy that can best be spared; False when none can."""
        with self._lock:
            held = [(self._leave_rank(m.name), m.used_s, m) for m in self._models.values() if m.cached is not None]
            spare = [(rank, used_s, model) for rank, used_s, model in held if rank is not None and rank <= rank_max]
            if not spare:
                return False
            self._release(min(spare, key=lambda known: known[:2])[2])
            return True

    def _release(self, model: HostModel) -> None:
        if model.host is not None:
            unpinned(model.host, self._device)
        model.host = None
        if model.cached is not None:
            model.cached.release()
            model.cached = None

    @staticmethod
    def _fill(model: HostModel, host: torch.Tensor) -> None:
        parts = model.skeleton.parts
        read_tensors((stored, place.view(parts[place.part].of(host))) for place, stored in model.pairs)


def match_tensors(
    folder: Path, places: tuple[PlacedTensor, ...], stored: dict[str, StoredTensor]
) -> list[tuple[PlacedTensor, StoredTensor]]:
    """Each weight's tensor in the checkpoint. A tied weight may be stored under any of its names.

    Raises:
        ModelLoadError: names tensors that are missing, unexpected or of another shape.
    """
    pairs = []
    missing = []
    for place in places:
        name = next((name for name in place.names if name in stored), None)
        if name is None:
            missing.append(place.names[0])
        else:
            pairs.append((place, stored[name]))
    known = {name for place in places for name in place.names}
    unexpected = [name for name in sorted(stored) if name not in known and not name.endswith(_IGNORED_SUFFIXES)]
    for what, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelLoadError(
                f"{folder}: the checkpoint {what} {len(names)} tensors, such as {', '.join(names[:3])}"
            )
    for place, tensor in pairs:
        if place.shape != tensor.shape:
            raise ModelLoadError(
                f"{folder}: tensor {tensor.name} has shape {tensor.shape}, the config says {place.shape}"
            )
    return pairs


def _cache_key(folder: Path, dtype: torch.dtype, pairs: list[tuple[PlacedTensor, StoredTensor]]) -> str:
    """What the bytes hang on: the files as they are now, the dtype and the layout."""
    files = sorted({stored.file for _, stored in pairs})
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    layout = [(place.names[0], place.part, place.offset_bytes) for place, _ in pairs]
    described = repr((LAYOUT_VERSION, str(dtype), state, layout))
    return f"{folder.name}-{hashlib.blake2b(described.encode(), digest_size=12).hexdigest()}"
