"""The LoRA adapters of a slot: read by any thread, and on the device from their load to their unload.

They are small beside the weights of their bases, and have memory of their own, of a size that is set. Switching to
another model leaves them where they are.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.checkpoints.adapters import read_adapter
from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.model.adapters import Adapter, read_factors
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
    """Adapters on `device`, of `size_max_bytes` together and of ranks up to `rank_max`. The thread that constructs this
    is the engine's; `prepare` may run on others.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, size_max_bytes: int, rank_max: int, ranks: int = 1
    ) -> None:
        """`ranks`: of the slot, which must be one."""
        self._dtype = dtype
        self._device = device
        self._size_max_bytes = size_max_bytes
        self._rank_max = rank_max
        self._ranks = ranks
        self._lock = threading.Lock()
        self._prepared: dict[str, tuple[_Source, Adapter]] = {}
        """Read, and not on the device yet."""
        self._loaded: dict[str, tuple[_Source, int]] = {}
        """The bytes of those on the device."""

    @property
    def used_bytes(self) -> int:
        """Their device memory."""
        with self._lock:
            return sum(size_bytes for _, size_bytes in self._loaded.values())

    def check_ranks(self, name: str) -> None:
        """Refuse an adapter before its base is read.

        Raises:
            ModelLoadError: the slot has several GPUs.
        """
        if self._ranks > 1:
            raise ModelLoadError(f"{name}: an adapter runs on slots of one GPU, not of {self._ranks}")

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
        size_bytes = stored.parameters * self._dtype.itemsize
        if size_bytes > self._size_max_bytes:
            raise self._too_large(spec.name, size_bytes)
        if base.skeleton.task != "generate":
            raise ModelLoadError(f"{spec.name}: {base.name} is for the task {base.skeleton.task}; adapters generate")
        adapter = read_factors(spec.name, stored, base.skeleton.adaptable_layers(), self._dtype)
        with self._lock:
            self._prepared[spec.name] = source, adapter

    def load(self, spec: ModelSpec, base: HostModel) -> None:
        """Bring a prepared adapter to the device. Idempotent.

        Raises:
            ModelLoadError: there is no memory for it.
        """
        adapters = base.skeleton.adapters
        if spec.name in adapters:
            return
        with self._lock:
            source, adapter = self._prepared.pop(spec.name)
        if adapter.size_bytes + self.used_bytes > self._size_max_bytes:
            raise self._too_large(spec.name, adapter.size_bytes)
        try:
            on_device = adapter.to(self._device)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"{spec.name}: no memory for {adapter.size_bytes} bytes on {self._device}") from error
        adapters.add(on_device, base.skeleton.adaptable_layers())
        with self._lock:
            self._loaded[spec.name] = source, adapter.size_bytes

    def unload(self, name: str, base: HostModel) -> None:
        """Free an adapter's memory."""
        base.skeleton.adapters.remove(name)
        with self._lock:
            self._loaded.pop(name, None)

    def _too_large(self, name: str, size_bytes: int) -> ModelLoadError:
        used = f"of adapters_bytes={self._size_max_bytes} of the slot, {self.used_bytes} are in use"
        return ModelLoadError(f"{name}: its factors take {size_bytes} bytes; {used}")
