"""Switching to a model that is in host memory, or was prefetched, against a plain copy of the same bytes."""

import time

import torch

from dataplane.engines.torch.memory.host_models import HostModel
from ops.profiling.checkpoints import BenchModel, DtypeName
from ops.profiling.figures import Figure, interleaved, medians, seconds
from ops.profiling.slot import BenchSlot, open_slot

COPY_RATIO_MAX = 1.25
PINNED_SHARE_MIN = 0.9
PREFETCHED_SHARE_MAX = 0.05
PINNED_SAMPLE_BYTES = 2**28


def measure_switch(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """Two models take turns in an arena that holds one. On CUDA: as a share of the rate from pinned memory."""
    with open_slot(models[:2], device=device, dtype=dtype, residents=1) as slot:
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


def measure_prefetch(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """The other model comes while one stays, then takes its turn: what the slot's own thread spends on both, as a share
    of a plain copy of its bytes.
    """
    with open_slot(models[:2], device=device, dtype=dtype, residents=2) as slot:
        running, coming = slot.models

        def prefetched_s() -> float:
            slot.weights.evict(coming.name)
            slot.switch(running)
            began_s = time.perf_counter()
            slot.prefetch(coming, keep=running)
            sent_s = time.perf_counter() - began_s
            slot.weights.await_all(coming)
            return sent_s + seconds(lambda: slot.switch(coming), slot.device)

        times_s = medians(
            interleaved(
                {"switch": prefetched_s, "copy": lambda: seconds(lambda: _copy(slot, coming), slot.device)},
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
                "bytes": coming.skeleton.size_bytes,
                "switch_s": times_s["switch"],
                "copy_s": times_s["copy"],
            },
        )


def _copy(slot: BenchSlot, model: HostModel) -> None:
    """One plain copy of the model's bytes into the arena; nobody computes with what is lost there."""
    assert model.host is not None, "without a cache nothing takes it away"
    slot.buffer[: model.host.numel()].copy_(model.host)


def _pinned_rate(device: torch.device, rounds: int) -> float:
    """Bytes per second from pinned host memory."""
    source = torch.zeros(PINNED_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    copy = interleaved({"copy": lambda: seconds(lambda: _discard(target.copy_(source)), device)}, rounds=rounds)
    return source.nbytes / medians(copy)["copy"]


def _discard(_: torch.Tensor) -> None:
    """A copy's result is not needed."""
