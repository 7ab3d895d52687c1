"""How fast weights come to the device: first as a plain copy did, then as the loads of whole models do."""

import time
from collections.abc import Iterable

import torch

from dataplane.engines.torch.streams import pinned, unpinned
from dataplane.memory.events import Event, TimedEvent

RATE_SAMPLE_BYTES = 2**25
RATE_LOAD_BYTES_MIN = 2**24
"""A load of fewer bytes says little about the rate: starting its copies takes as long as they do."""
RATE_SHARE = 0.25
"""What the last load counts in the rate; those before it fade by the rest."""


class WireRate:
    """The rate of one wire."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.s_per_byte = 1 / measured_rate(buffer)

    def learn(self, size_bytes: int, sent_s: float, events: Iterable[Event]) -> None:
        """Let a load that was sent at `sent_s` by `time.monotonic`, and is over, correct the estimate."""
        if size_bytes < RATE_LOAD_BYTES_MIN:
            return
        ends_s = [event.ended_s for event in events if isinstance(event, TimedEvent)]
        took_s = max((end_s for end_s in ends_s if end_s is not None), default=time.monotonic()) - sent_s
        self.s_per_byte += RATE_SHARE * (took_s / size_bytes - self.s_per_byte)


def measured_rate(buffer: torch.Tensor) -> float:
    """Bytes per second of a plain copy into `buffer`, whose content is lost, from host memory such as models have:
    written before, and pinned where CUDA allows it. The best of three; the first one takes the pages of `buffer`.
    """
    target = buffer[:RATE_SAMPLE_BYTES]
    source = pinned(torch.ones(target.shape, dtype=torch.uint8), buffer.device)
    times_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        target.copy_(source)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        times_s.append(time.perf_counter() - began_s)
    unpinned(source, buffer.device)
    return source.nbytes / min(times_s)
