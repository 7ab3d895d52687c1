"""LoRA adapters beside a model that vLLM runs: what is checked before vLLM reads one, and the names it knows them by.

vLLM reserves memory for its adapters when it builds a model: for so many, each of so high a rank. It puts factors of
any shape that fits into that memory, and numbers that are not finite too, so that both are checked here. Its prefix
cache tells adapters apart by name and path alone: each load has a name of its own, so that the KV of numbers that were
replaced is not found.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.lora.request import LoRARequest

from dataplane.checkpoints.adapters import WEIGHTS_FILE, StoredAdapter, read_adapter
from dataplane.checkpoints.safetensors_file import list_tensors
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import ModelSpec

_RANKS = (1, 8, 16, 32, 64, 128)
"""Those for which vLLM reserves memory."""


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """The most adapters of a model, and their highest rank, one of vLLM's; 0 and 0: it serves none. `places`: for how
    many vLLM reserves memory. On a CPU that is one more: to rows without an adapter vLLM adds what is in the last
    place, which must stay zeros.
    """

    count: int = 0
    rank: int = 0
    places: int = 0

    @classmethod
    def of(cls, *, adapters_max: int, rank_max: int, asked: int, asked_rank: int, device: str) -> "AdapterLimits":
        """By a slot's settings. `asked`: how many adapters its base is built for, and `asked_rank`: their highest rank;
        0 and 0 for none.
        """
        wanted = max(rank_max if adapters_max else 0, asked_rank)
        if not wanted:
            return cls()
        count = max(adapters_max, asked)
        places = count + 1 if device == "cpu" else count
        return cls(count=count, rank=min(rank for rank in _RANKS if rank >= wanted), places=places)

    def reserved_bytes(self, base: Path, item_bytes: int) -> int:
        """At most what vLLM reserves for the factors of all matrices of a checkpoint, on each GPU."""
        if not self.places:
            return 0
        sides = sum(sum(tensor.shape) for tensor in list_tensors(base).values() if len(tensor.shape) == 2)
        return self.places * self.rank * sides * item_bytes


NO_ADAPTERS = AdapterLimits()


class Adapters:
    """Those of one vLLM engine."""

    def __init__(self, engine: Any, limits: AdapterLimits) -> None:
        self.limits = limits
        self._engine = engine
        self._requests: dict[str, LoRARequest] = {}
        self._ids = count(1)

    def request(self, name: str) -> LoRARequest | None:
        """By which vLLM knows an adapter; None for the base, which has no name."""
        return self._requests[name] if name else None

    def add(self, spec: ModelSpec) -> None:
        """Serve a checked adapter. Idempotent.

        Raises:
            ModelLoadError: the model serves no adapters, as many as it can, or none of that rank; or vLLM refuses it.
        """
        loaded = self._requests.get(spec.name)
        if loaded is not None:
            if loaded.lora_path != spec.path:
                raise ModelLoadError(f"{spec.name} is loaded from {loaded.lora_path}, not from {spec.path}")
            return
        self._check_limits(spec)
        number = next(self._ids)
        request = LoRARequest(lora_name=f"{spec.name}#{number}", lora_int_id=number, lora_path=spec.path)
        try:
            self._engine.add_lora(request)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # whatever vLLM refuses, the base and its other adapters continue
            self._engine.remove_lora(number)
            raise ModelLoadError(f"{spec.name}: vLLM refuses the adapter: {error}") from error
        self._requests[spec.name] = request

    def remove(self, name: str) -> None:
        """Serve an adapter no more. It must have no requests."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._engine.remove_lora(request.lora_int_id)

    def _check_limits(self, spec: ModelSpec) -> None:
        rank = read_adapter(Path(spec.path)).rank
        if not self.limits.count:
            raise ModelLoadError(
                f"{spec.name}: its base is loaded for no adapters; vllm_adapters_max must be 1 at least, and"
                " vllm_models_max 1, or its base be loaded anew"
            )
        if rank > self.limits.rank:
            raise ModelLoadError(
                f"{spec.name}: r is {rank}, and its base is loaded for ranks up to {self.limits.rank}"
                " (vllm_adapter_rank_max) until it is loaded anew"
            )
        if len(self._requests) >= self.limits.count:
            here = ", ".join(sorted(self._requests))
            raise ModelLoadError(
                f"{spec.name}: its base is loaded for {self.limits.count} adapters (vllm_adapters_max), and has {here},"
                " until it is loaded anew"
            )


def readable_ranks(folders: Iterable[str]) -> list[int]:
    """The ranks of adapters, by their folders, but of those that cannot be read: their own loads fail, and say why."""
    ranks = []
    for folder in folders:
        with suppress(ModelLoadError):
            ranks.append(read_adapter(Path(folder)).rank)
    return ranks


def check_adapter_of(spec: ModelSpec) -> StoredAdapter:
    """Check that an adapter is of its base and has finite numbers only.

    Raises:
        ModelLoadError: its folder cannot be used, it changes what its base does not have in this shape, its base is
            packed, or a number is not finite.
    """
    assert spec.base is not None
    if spec.task != "generate":
        raise ModelLoadError(f"{spec.name} is for the task {spec.task}; adapters generate")
    stored, there = read_adapter(Path(spec.path)), list_tensors(Path(spec.base.path))
    for layer, factors in stored.layers.items():
        weights = there.get(f"{layer}.weight")
        if weights is None:
            packed = f"{layer}.qweight" in there
            why = "is packed in its base; adapters of packed bases run on torch" if packed else "its base does not have"
            raise ModelLoadError(f"{spec.name}: {spec.path} changes {layer}, which {why}")
        found = factors.up.shape[0], factors.down.shape[1]
        if found != weights.shape:
            raise ModelLoadError(
                f"{spec.name}: {spec.path} is of another base: it changes {layer} of shape {found}, not {weights.shape}"
            )
    for name, factor in _tensors(Path(spec.path) / WEIGHTS_FILE):
        if not factor.isfinite().all():
            raise ModelLoadError(f"{spec.name}: the numbers of {name} in {spec.path} are not all finite")
    return stored


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
