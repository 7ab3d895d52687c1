"""The LoRA adapters of a slot: read by any thread, and on the device from their load to their unload.

They are small beside the weights of their bases, and have memory of their own, of a size that is set. Switching to
another model leaves them where they are. On a slot of several GPUs this process reads them, once, and each rank gets
its part.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.checkpoints.adapters import read_adapter
from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.model.adapters import Adapter, check_layers, part_bytes, read_factors
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import ModelSpec


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where an adapter was read, and for which model."""

    folder: Path
    base: str
    base_folder: Path

    def __str__(self) -> str:
        return f"{self.folder} for {self.base} of {self.base_folder}"


class AdapterStore:
    """Adapters on `device`, of `size_max_bytes` together and of ranks up to `rank_max`; on a slot of several GPUs, of
    `ranks`, the parts of them that are on this one. The thread that constructs this is the engine's; `prepare` may run
    on others.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, size_max_bytes: int, rank_max: int, ranks: int = 1
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._size_max_bytes = size_max_bytes
        self._rank_max = rank_max
        self._ranks = ranks
        self._lock = threading.Lock()
        self._prepared: dict[str, tuple[_Source, tuple[Adapter, ...]]] = {}
        """Read, and not on the device yet: the parts of all ranks."""
        self._loaded: dict[str, tuple[_Source, int]] = {}
        """The bytes of those on the device."""

    @property
    def used_bytes(self) -> int:
        """Their device memory."""
        with self._lock:
            return sum(size_bytes for _, size_bytes in self._loaded.values())

    def prepare(self, spec: ModelSpec, base: HostModel) -> None:
        """Read an adapter of a model into host memory. Idempotent.

        Raises:
            ModelLoadError: its folder cannot be used, or is not of this base; it exceeds the limits; or an adapter of
                its name is loaded from another folder, or for another base.
        """
        source = _Source(folder=Path(spec.path), base=base.name, base_folder=base.folder)
        with self._lock:
            loaded, prepared = self._loaded.get(spec.name), self._prepared.get(spec.name)
        if loaded is not None and loaded[0] != source:
            raise ModelLoadError(f"{spec.name} is loaded from {loaded[0]}, not from {source}")
        if loaded is not None or (prepared is not None and prepared[0] == source):
            return
        stored = read_adapter(source.folder, rank_max=self._rank_max)
        if base.skeleton.task != "generate":
            raise ModelLoadError(f"{spec.name}: {base.name} is for the task {base.skeleton.task}; adapters generate")
        layers, splits = base.skeleton.adaptable_layers(), base.skeleton.layer_splits()
        check_layers(spec.name, stored, layers, splits)
        size_bytes = part_bytes(stored, layers, self._dtype)
        if size_bytes > self._size_max_bytes:
            raise self._too_large(spec.name, size_bytes)
        adapter = read_factors(spec.name, stored, self._dtype)
        parts = tuple(adapter.part(splits, rank) for rank in range(self._ranks))
        with self._lock:
            self._prepared[spec.name] = source, parts

    def has(self, name: str) -> bool:
        """Whether an adapter of this name was read, or is on the device."""
        with self._lock:
            return name in self._prepared or name in self._loaded

    def forget(self, name: str) -> None:
        """Free the factors of an adapter that was prepared and is not on the device."""
        with self._lock:
            self._prepared.pop(name, None)

    def load(self, spec: ModelSpec, base: HostModel) -> None:
        """Bring a prepared adapter to the device, and its other parts to the other ranks. Idempotent.

        Raises:
            ModelLoadError: there is no memory for it, here or on another rank.
        """
        adapters = base.skeleton.adapters
        if spec.name in adapters:
            return
        with self._lock:
            source, (adapter, *others) = self._prepared.pop(spec.name)
        if adapter.size_bytes + self.used_bytes > self._size_max_bytes:
            raise self._too_large(spec.name, adapter.size_bytes)
        try:
            on_device = adapter.to(self._device)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"{spec.name}: no memory for {adapter.size_bytes} bytes on {self._device}") from error
        if base.skeleton.mirror is not None:
            base.skeleton.mirror.adapt(others)
        adapters.add(on_device, base.skeleton.adaptable_layers())
        with self._lock:
            self._loaded[spec.name] = source, adapter.size_bytes

    def unload(self, name: str, base: HostModel) -> None:
        """Free an adapter's memory."""
        base.skeleton.adapters.remove(name)
        if base.skeleton.mirror is not None:
            base.skeleton.mirror.drop_adapter(name)
        with self._lock:
            self._loaded.pop(name, None)

    def _too_large(self, name: str, size_bytes: int) -> ModelLoadError:
        used = f"of adapters_bytes={self._size_max_bytes} of the slot, {self.used_bytes} are in use"
        each = "" if self._ranks == 1 else f" on each of {self._ranks} GPUs"
        return ModelLoadError(f"{name}: its factors take {size_bytes} bytes{each}; {used}")
