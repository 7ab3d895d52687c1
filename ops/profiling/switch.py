"""The cost of a model switch: against a plain copy of the same bytes, prefetched, and without any copy (choice of
slabs, evictions, submission of weight shards, binding of tensors).

A slot here has only what switches models: models in host memory, an arena for some of them, and a copy stream.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.cuda import direct_parts
from dataplane.engines.torch.copies.open import make_stream
from dataplane.engines.torch.memory.host_models import HostModel, HostModels
from dataplane.engines.torch.memory.transfer_rates import transfer_rates
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.events import PASSED, Event
from dataplane.memory.slabs import SlabArena
from ops.profiling.checkpoints import BenchModel, DtypeName
from ops.profiling.figures import Figure, interleaved, medians, seconds

SLAB_BYTES = 2**20


class NullStream:
    """A copy stream that copies nothing."""

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        return PASSED

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class BenchSlot:
    """`models` are in host memory; `weights` holds as many of them as the arena takes."""

    device: torch.device
    buffer: torch.Tensor
    weights: WeightStore
    models: tuple[HostModel, ...]

    def switch(self, model: HostModel) -> None:
        """Load a model as a step does before running it, and wait for all of its weights."""
        self.weights.settle()
        self.load(model)
        self.weights.await_all(model)

    def load(self, model: HostModel, *, keep: str | None = None) -> None:
        """Start loading a model; `keep` names one that is not evicted for it."""
        fits = self.weights.load(model, 0.0, keep=keep)
        assert fits, f"{model.name} does not fit the arena"


@contextmanager
def open_slot(
    models: Sequence[BenchModel],
    *,
    device: str,
    dtype: DtypeName,
    residents: int,
    moves: bool = True,
    threads: int | None = None,
) -> Iterator[BenchSlot]:
    """A slot whose arena holds `residents` of the largest model. `moves` False: without the copies. `threads` copy on
    the host; None: as many as torch computes with.
    """
    torch_device = torch.device(device)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    host_models = HostModels(
        None, torch_dtype, torch_device, SLAB_BYTES, leave_rank=lambda _: None, in_use=lambda _: False
    )
    copying = torch.get_num_threads() if threads is None else threads
    stream: CopyStream = make_stream(torch_device, "bench", threads=copying) if moves else NullStream()
    try:
        known = tuple(host_models.prepare(model.name, model.folder, slabs_max=sys.maxsize) for model in models)
        slabs = residents * max(model.skeleton.slabs(SLAB_BYTES) for model in known)
        buffer = torch.zeros(slabs * SLAB_BYTES, dtype=torch.uint8, device=torch_device)
        arena = SlabArena(slabs, weights_slabs=slabs)
        weights = WeightStore(arena, buffer, SLAB_BYTES, stream, transfer_rates(buffer).weights)
        yield BenchSlot(device=torch_device, buffer=buffer, weights=weights, models=known)
    finally:
        stream.close()
        host_models.close()


CONTROL_MAX_MS = 5.0
SWITCHES = 10


def measure_control(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """Milliseconds per switch between two models in an arena that holds one, without copies."""
    with open_slot(models[:2], device=device, dtype=dtype, residents=1, moves=False) as slot:

        def switch_repeatedly() -> None:
            for number in range(SWITCHES):
                slot.switch(slot.models[number % 2])

        times_s = interleaved({"switch": lambda: seconds(switch_repeatedly, slot.device) / SWITCHES}, rounds=rounds)
        return Figure(
            name="control overhead of a switch",
            value=1e3 * medians(times_s)["switch"],
            unit="ms",
            bound="at most",
            target=CONTROL_MAX_MS,
            details={
                "layers": slot.models[0].skeleton.geometry.layers,
                "best_ms": 1e3 * min(times_s["switch"]),
                "parts": len(slot.models[0].skeleton.shards),
            },
        )


COPY_RATIO_MAX = 1.25
PINNED_SHARE_MIN = 0.9
PREFETCHED_SHARE_MAX = 0.05
PINNED_SAMPLE_BYTES = 2**28


def measure_switch(
    models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int, threads: int | None = None
) -> Figure:
    """Switches between two models in an arena that holds one. On CUDA: as a share of the rate from pinned memory."""
    with open_slot(models[:2], device=device, dtype=dtype, residents=1, threads=threads) as slot:
        first, second = slot.models
        times_s = medians(
            interleaved(
                {
                    "switch": lambda: seconds(lambda: slot.switch(first), slot.device),
                    "copy": lambda: seconds(lambda: _copy(slot, first), slot.device),
                    "back": lambda: seconds(lambda: slot.switch(second), slot.device),
                },
                rounds=rounds,
            )
        )
        size_bytes = first.skeleton.size_bytes
        details = {"bytes": size_bytes, "switch_s": times_s["switch"], "copy_s": times_s["copy"]}
        ratio = times_s["switch"] / times_s["copy"]
        if slot.device.type != "cuda":
            return Figure(
                name="switch, against a plain copy",
                value=ratio,
                unit="x",
                bound="at most",
                target=COPY_RATIO_MAX,
                details=details,
            )
        pinned = _pinned_rate(slot.device, rounds)
        return Figure(
            name="switch, share of the pinned rate",
            value=size_bytes / times_s["switch"] / pinned,
            unit="",
            bound="at least",
            target=PINNED_SHARE_MIN,
            details={**details, "copy_ratio": ratio, "pinned_bytes_per_s": pinned},
        )


def measure_prefetch(
    models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int, threads: int | None = None
) -> Figure:
    """The time that the slot's thread spends on a prefetch and the switch to the prefetched model, as a share of a
    plain copy of its bytes.
    """
    with open_slot(models[:2], device=device, dtype=dtype, residents=2, threads=threads) as slot:
        running, other = slot.models

        def prefetched_s() -> float:
            slot.weights.evict(other.name)
            slot.switch(running)
            began_s = time.perf_counter()
            slot.load(other, keep=running.name)
            submit_s = time.perf_counter() - began_s
            slot.weights.await_all(other)
            return submit_s + seconds(lambda: slot.switch(other), slot.device)

        times_s = medians(
            interleaved(
                {"switch": prefetched_s, "copy": lambda: seconds(lambda: _copy(slot, other), slot.device)},
                rounds=rounds,
            )
        )
        return Figure(
            name="switch to a prefetched model, against that copy",
            value=times_s["switch"] / times_s["copy"],
            unit="x",
            bound="at most",
            target=PREFETCHED_SHARE_MAX,
            details={
                "bytes": other.skeleton.size_bytes,
                "switch_s": times_s["switch"],
                "copy_s": times_s["copy"],
            },
        )


def _copy(slot: BenchSlot, model: HostModel) -> None:
    """One plain copy of the model's bytes into the arena. What it overwrites is not used."""
    assert model.host is not None, "without a cache nothing evicts it"
    for source, target in direct_parts(Copy(model.host, slot.buffer[: model.host.numel()])):
        target.copy_(source, non_blocking=True)


def _pinned_rate(device: torch.device, rounds: int) -> float:
    """Bytes per second from pinned host memory."""
    source = torch.zeros(PINNED_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    copy = interleaved({"copy": lambda: seconds(lambda: target.copy_(source), device)}, rounds=rounds)
    return source.nbytes / medians(copy)["copy"]
