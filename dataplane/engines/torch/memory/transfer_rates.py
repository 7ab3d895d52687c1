"""Transfer rates between host memory and the device: that of a plain copy at first, then of real transfers."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.copies.cuda import direct_parts
from dataplane.engines.torch.copies.open import pinned, unpinned
from dataplane.memory.events import Event, TimedEvent

RATE_SAMPLE_BYTES = 2**25
RATE_BYTES_MIN = 2**24
"""Smaller transfers are not measured: starting their copies takes as long as the copies."""
RATE_SHARE = 0.25
"""The weight of the last transfer in the exponentially weighted mean."""


class TransferRate:
    """The rate of one kind of transfers, which run one after another. `known`: it is configured and never updated."""

    def __init__(self, bytes_per_s: float, *, known: bool = False) -> None:
        self.s_per_byte = 1 / bytes_per_s
        self._known = known
        self._ended_s = -inf

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.s_per_byte

    def learn(self, size_bytes: int, sent_s: float, events: Iterable[Event]) -> None:
        """Update the estimate by a transfer that was submitted at `sent_s` by `time.monotonic` and has ended. Time it
        waited for the transfer before it does not count.
        """
        ends_s = [event.ended_s for event in events if isinstance(event, TimedEvent)]
        ended_s = max((end_s for end_s in ends_s if end_s is not None), default=time.monotonic())
        took_s = ended_s - max(sent_s, self._ended_s)
        self._ended_s = max(ended_s, self._ended_s)
        if size_bytes >= RATE_BYTES_MIN and took_s > 0 and not self._known:
            self.s_per_byte += RATE_SHARE * (took_s / size_bytes - self.s_per_byte)


@dataclass(frozen=True, kw_only=True)
class TransferRates:
    """The rates of a slot: `weights` and `kv_in` to the device, `kv_out` from it."""

    weights: TransferRate
    kv_in: TransferRate
    kv_out: TransferRate


def transfer_rates(buffer: torch.Tensor, known_bytes_per_s: float | None = None) -> TransferRates:
    """The rates of the host link to `buffer`, whose content is lost: of a plain copy each way, or as `known`."""
    if known_bytes_per_s is not None:
        known = [TransferRate(known_bytes_per_s, known=True) for _ in range(3)]
        return TransferRates(weights=known[0], kv_in=known[1], kv_out=known[2])
    in_bytes_per_s, out_bytes_per_s = measured_rates(buffer)
    return TransferRates(
        weights=TransferRate(in_bytes_per_s), kv_in=TransferRate(in_bytes_per_s), kv_out=TransferRate(out_bytes_per_s)
    )


def measured_rates(buffer: torch.Tensor) -> tuple[float, float]:
    """Bytes per second of a plain copy into `buffer`, whose content is lost, and out of it. The host memory is like
    that of models: written before, and pinned where CUDA allows it.
    """
    device = buffer[:RATE_SAMPLE_BYTES]
    host = pinned(torch.ones(device.shape, dtype=torch.uint8), buffer.device)
    try:
        return _copy_rate(host, device), _copy_rate(device, host)
    finally:
        unpinned(host, buffer.device)


def _copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """The best of three; the first one allocates the pages of `target`."""
    times_s = []
    parts = direct_parts(Copy(source, target))
    for _ in range(3):
        began_s = time.perf_counter()
        for one, other in parts:
            other.copy_(one)
        if source.is_cuda or target.is_cuda:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)
    return source.nbytes / min(times_s)
