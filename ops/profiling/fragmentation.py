"""Fragmentation of a unified KV cache under a random load of several shapes (Aegaeon 7.3, figure 16).

Only the bookkeeping runs: no tensors, no engine, no clock. A step is one token of every running sequence.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane.memory.events import Passed
from dataplane.memory.kv_cache import HostSlabs, KvCache, KvShape, OutOfBlocksError, ShapeUsage, blocks_for

# Aegaeon's table 1: Qwen-7B, InternLM2.5-7B-chat, LLaMA-13B and Qwen-72B, in blocks of 16 tokens of 16-bit numbers.
TABLE_1_SHAPES = tuple(
    KvShape(layers=layers, kv_heads=kv_heads, head_dim=128, block_tokens=16, itemsize=2)
    for layers, kv_heads in ((32, 32), (32, 8), (40, 40), (80, 64))
)
PROMPT_TOKENS_MEAN = 200
OUTPUT_TOKENS_MEAN = 250
COPY_STEPS_MAX = 3
CHECK_EVERY_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """Unused bytes over held bytes, each summed over the steps: `overall`, and by shape.

    `peak`: the same at the step with the most held bytes. `load`: held bytes over capacity, each summed over the steps.
    """

    overall: float
    peak: float
    load: float
    by_shape: dict[KvShape, float]


def simulate_fragmentation(
    shapes: Sequence[KvShape] = TABLE_1_SHAPES,
    *,
    seed: int,
    steps: int,
    slabs: int = 2048,
    slab_bytes: int = 128 * 2**20,
    load: float = 0.7,
) -> Fragmentation:
    """Serve sequences of random shape and length with random arrivals, and measure after each step.

    The arrival rate is that at which the mean use of the memory is `load`. A sequence ends when no block is free.
    Blocks are freed while a copy still reads them, for up to `COPY_STEPS_MAX` steps.
    """
    host = HostSlabs(slabs)
    simulation = _Simulation(shapes=shapes, chance=random.Random(seed), cache=KvCache(host, slab_bytes))
    token_bytes_mean = sum(shape.block_bytes / shape.block_tokens for shape in shapes) / len(shapes)
    # A sequence of p + o tokens holds p + t of them at its step t: in the mean over exponential p and o, p o + o^2.
    token_steps_mean = OUTPUT_TOKENS_MEAN * (PROMPT_TOKENS_MEAN + OUTPUT_TOKENS_MEAN)
    arrivals_per_step = load * slabs * slab_bytes / (token_bytes_mean * token_steps_mean)
    usages: list[dict[KvShape, ShapeUsage]] = []
    for step in range(steps):
        simulation.advance(arrivals_per_step)
        usages.append(simulation.cache.usage())
        if step % CHECK_EVERY_STEPS == 0:
            simulation.cache.check()
            host.check()
    return _measure(usages, slabs * slab_bytes)


@dataclass(kw_only=True)
class _Running:
    shape: KvShape
    tokens: int
    end_tokens: int
    blocks: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Simulation:
    shapes: Sequence[KvShape]
    chance: random.Random
    cache: KvCache
    running: list[_Running] = field(default_factory=list)
    step: int = 0
    arrivals_due: float = 0.0

    def advance(self, arrivals_per_step: float) -> None:
        """One token for every sequence, after which some end and new ones start."""
        self.step += 1
        self.cache.settle()
        self.running = [sequence for sequence in self.running if self._grow(sequence)]
        self.arrivals_due += self.chance.expovariate(1 / arrivals_per_step)
        while self.arrivals_due >= 1:
            self.arrivals_due -= 1
            tokens = 1 + round(self.chance.expovariate(1 / PROMPT_TOKENS_MEAN))
            end_tokens = tokens + 1 + round(self.chance.expovariate(1 / OUTPUT_TOKENS_MEAN))
            sequence = _Running(shape=self.chance.choice(self.shapes), tokens=tokens, end_tokens=end_tokens)
            if self._grow(sequence):
                self.running.append(sequence)

    def _grow(self, sequence: _Running) -> bool:
        """Give the sequence its next token. Returns whether it continues."""
        sequence.tokens += 1
        needed = blocks_for(sequence.tokens, sequence.shape.block_tokens) - len(sequence.blocks)
        try:
            if sequence.tokens < sequence.end_tokens:
                sequence.blocks += self.cache.allocate(sequence.shape, needed)
                return True
        except OutOfBlocksError:
            pass
        copy = _Copy(simulation=self, end_step=self.step + self.chance.randint(0, COPY_STEPS_MAX))
        self.cache.free(sequence.shape, sequence.blocks, copy)
        return False


class _Copy(Passed):
    """An event that is done from `end_step` on."""

    def __init__(self, *, simulation: _Simulation, end_step: int) -> None:
        self._simulation = simulation
        self._end_step = end_step

    def done(self) -> bool:
        return self._simulation.step >= self._end_step


def _measure(usages: Sequence[dict[KvShape, ShapeUsage]], capacity_bytes: int) -> Fragmentation:
    used_bytes: Counter[KvShape] = Counter()
    held_bytes: Counter[KvShape] = Counter()
    for usage in usages:
        for shape, one in usage.items():
            used_bytes[shape] += one.used_bytes
            held_bytes[shape] += one.held_bytes
    peak = max(usages, key=lambda usage: sum(one.held_bytes for one in usage.values()))
    return Fragmentation(
        overall=_unused(used_bytes.total(), held_bytes.total()),
        peak=_unused(sum(one.used_bytes for one in peak.values()), sum(one.held_bytes for one in peak.values())),
        load=held_bytes.total() / (capacity_bytes * len(usages)),
        by_shape={shape: _unused(used_bytes[shape], held_bytes[shape]) for shape in sorted(held_bytes)},
    )


def _unused(used_bytes: int, held_bytes: int) -> float:
    return ShapeUsage(used_bytes=used_bytes, held_bytes=held_bytes, moving_bytes=0).fragmentation
