"""Times of prefills and decode steps of a model on this machine: the points that a latency model is fitted to."""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.core.sampler import Draw, choose_tokens
from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.memory.host_models import HostModels
from dataplane.engines.torch.memory.kv import SequenceKv
from dataplane.engines.torch.memory.models import kv_shape
from dataplane.engines.torch.memory.transfer_rates import RATE_SAMPLE_BYTES, measured_rates
from dataplane.engines.torch.model.runner import run_chunks
from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.memory.kv_cache import blocks_for
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.fit import DecodePoint, PrefillPoint
from ops.profiling.figures import Progress

BATCHES = (1, 4, 16)
SHORTEST_TOKENS = 16
BLOCK_TOKENS = 16
POINTS_ENOUGH = 6

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class StepTimesSettings:
    """Steps of up to `tokens_max` tokens (or tokens of context). After `POINTS_ENOUGH` points of a kind, none begins
    later than `seconds_max` after the first.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tokens_max: int = 4096
    repeats: int = 3
    seconds_max: float = 60.0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured points. `rate_bytes_per_s`: of a plain copy from host memory to the device."""

    weights_bytes: int
    rate_bytes_per_s: float
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]


def measure_step_times(folder: Path, settings: StepTimesSettings, report: Progress) -> StepTimes:
    """Run steps of the torch engine's runner, short ones first. A point is the median of several runs.

    Raises:
        ModelLoadError: the folder holds no model that the engine runs.
    """
    bench = _Bench(folder, settings)
    prefill = [
        PrefillPoint(tokens=length * batch, squared_tokens=length**2 * batch, seconds=seconds)
        for length, batch, seconds in bench.points("prefill", report)
    ]
    decode = [
        DecodePoint(context_tokens=length * batch, batch=batch, seconds=seconds)
        for length, batch, seconds in bench.points("decode", report)
    ]
    return StepTimes(
        weights_bytes=bench.skeleton.size_bytes,
        rate_bytes_per_s=bench.rate_bytes_per_s,
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def grid(tokens_max: int, context_tokens: int) -> list[tuple[int, int]]:
    """(length, batch) of the steps to measure, from few tokens to many; lengths grow by steps of 4."""
    lengths = []
    length = SHORTEST_TOKENS
    while length <= min(tokens_max, context_tokens - 1):
        lengths.append(length)
        length *= 4
    shapes = [(length, batch) for length, batch in product(lengths, BATCHES) if length * batch <= tokens_max]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))


class _Bench:
    """A model with its weights on the device, and KV for the largest step."""

    def __init__(self, folder: Path, settings: StepTimesSettings) -> None:
        self._settings = settings
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        models = HostModels(None, dtype, device, 1, leave_rank=lambda _: None, in_use=lambda _: False)
        model = models.prepare(folder.name, folder, slabs_max=sys.maxsize)
        assert model.host is not None, "without a cache nothing evicts it"
        weights = model.host.to(device)
        models.close()
        self.skeleton = model.skeleton
        self.skeleton.bind([shard.of(weights) for shard in self.skeleton.shards])
        geometry = self.skeleton.geometry
        self._shape = kv_shape(geometry, BLOCK_TOKENS, dtype)
        blocks = blocks_for(settings.tokens_max, BLOCK_TOKENS) + 2 * max(BATCHES)
        sizes = (blocks, 1, geometry.layers, 2, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
        self._cache = torch.zeros(sizes, dtype=dtype, device=device)
        self.rate_bytes_per_s, _ = measured_rates(torch.empty(RATE_SAMPLE_BYTES, dtype=torch.uint8, device=device))

    def points(self, kind: Kind, report: Progress) -> Iterator[tuple[int, int, float]]:
        """(length, batch, seconds) of the steps of the grid, until the time limit."""
        shapes = grid(self._settings.tokens_max, self.skeleton.geometry.context_tokens)
        began_s = time.perf_counter()
        for number, (length, batch) in enumerate(shapes):
            if number >= POINTS_ENOUGH and time.perf_counter() - began_s > self._settings.seconds_max:
                break
            report(f"{kind} of {batch} x {length} tokens", number, len(shapes))
            yield length, batch, self._seconds(kind, length, batch)
        report(kind, len(shapes), len(shapes))

    def _seconds(self, kind: Kind, length: int, batch: int) -> float:
        """The median time of a step of `batch` sequences, after a warm-up step."""
        sequences = [self._sequence(number, length, batch, cached=kind == "decode") for number in range(batch)]
        chunks = [Chunk(sequence=sequence, count=sequence.pending) for sequence in sequences]
        draws = [Draw(temperature=0.0, top_p=1.0, seed=0, position=length)] * batch
        times_s = []
        for _ in range(self._settings.repeats + 1):
            began_s = time.perf_counter()
            choose_tokens(run_chunks(self.skeleton, self._cache, chunks), draws)  # tokens on the host end the step
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s[1:])

    def _sequence(self, number: int, length: int, batch: int, *, cached: bool) -> TokenSequence:
        """A prompt of `length` tokens to prefill, or one more token after `length` that have keys and values."""
        prompt = tuple(range(number, number + length + cached))
        blocks = range(number, batch * blocks_for(len(prompt), BLOCK_TOKENS), batch)
        return TokenSequence(
            request=EngineRequest(
                request_id=str(number),
                instance_id="bench",
                tier=Tier.IW_F,
                prompt=tuple(token % self.skeleton.geometry.vocabulary for token in prompt),
                max_tokens=1,
            ),
            model="bench",
            order=number,
            added_s=0.0,
            kv=SequenceKv(shape=self._shape, location=KvLocation.DEVICE, blocks=list(blocks)),
            cached=length if cached else 0,
        )


def machine_memory(device: str) -> tuple[str, int]:
    """Name and memory in bytes of the device."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return str(properties.name), int(properties.total_memory)
    return f"CPU ({torch.get_num_threads()} threads)", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
