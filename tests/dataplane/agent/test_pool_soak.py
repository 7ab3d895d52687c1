"""Storms over a pooled node: clients leave, workers die, host memory fills up. Nothing is lost, nothing leaks.

`TIDEPOOL_SOAK_S` says for how long; a few seconds unless it is set. The figures are logged (`pytest -rP`).
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import structlog

from dataplane.memory.model_cache import HostMemoryError, ModelCache
from dataplane.protocol.messages import Failed, Finished, ModelSpec
from tests.dataplane.agent.test_torch_node import body, calm_tokens, checkpoint, instances, torch_settings
from tests.dataplane.replay_node import Node, running_node
from tests.dataplane.streams import kill, read, token_ids
from tests.event_loop import asynchronous

log = structlog.get_logger()

SOAK_S = float(os.environ.get("TIDEPOOL_SOAK_S", "8"))
LAYERS = {"tide": 3, "ebb": 2, "flow": 4, "neap": 3}
SEEDS = [(name, seed) for name in LAYERS for seed in range(3)]

Calm = dict[tuple[str, int], list[int]]


class Storm:
    """What happened in it."""

    def __init__(self, node: Node, ends_s: float) -> None:
        self.node = node
        self.ends_s = ends_s
        self.seen: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends_s

    async def client(self, chance: random.Random, calm: Calm) -> None:
        """Ask again and again; leave in the middle now and then."""
        while not self.over:
            await self.node.until(lambda: "ready" in self.node.states().values())
            name, seed = chance.choice(SEEDS)
            events_max = chance.choice((None, None, chance.randrange(1, 30)))
            events = await read(self.node, body(f"s{time.monotonic_ns()}", seed, name), events_max=events_max)
            if isinstance(events[0], Failed):
                assert events[0].status in (409, 503), events[0]
                self.seen["refused"] += 1
                await asyncio.sleep(0.05)
                continue
            made = token_ids(events)
            assert made == calm[name, seed][: len(made)]
            if events_max is None or isinstance(events[-1], Finished):
                assert isinstance(events[-1], Finished), events[-1]
                assert made == calm[name, seed]
                self.seen["finished"] += 1
            else:
                self.seen["left"] += 1

    async def killer(self, chance: random.Random) -> None:
        """Kill a worker every few seconds: mostly one at work, now and then one that starts or loads; then none until
        all are at work again, or a slow machine would do nothing but start workers.
        """
        while not self.over:
            await asyncio.sleep(chance.uniform(1.0, 6.0))
            at_work = chance.random() < 0.8
            killed = kill(self.node, chance.choice(("prefill", "decode")), at_work=at_work)
            self.seen["killed_at_work" if at_work else "killed_at_any_time"] += killed
            if killed and not at_work:
                await self.node.until(lambda: self.over or set(self.node.states().values()) == {"ready"})

    async def filler(self, chance: random.Random, cache: ModelCache, largest_bytes: int) -> None:
        """Take host memory away from the node for a while."""
        while not self.over:
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            try:
                size_bytes = chance.randrange(1, largest_bytes)
                taken = cache.acquire(f"filler-{time.monotonic_ns()}", size_bytes, lambda view: None)
            except HostMemoryError:
                self.seen["full"] += 1
                continue
            self.seen["filled"] += 1
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            taken.release()


def specs_in(folder: Path) -> list[ModelSpec]:
    return [checkpoint(folder / name, name, num_hidden_layers=count) for name, count in LAYERS.items()]


@pytest.mark.slow
@asynchronous
async def test_nothing_is_lost_and_nothing_leaks(tmp_path: Path) -> None:
    specs = specs_in(tmp_path)
    calm = dict(zip(SEEDS, calm_tokens(specs, SEEDS), strict=True))
    largest_bytes = max(spec.weights_bytes for spec in specs)
    settings = torch_settings(2, split=True, cache_dir=tmp_path / "host").model_copy(
        update={
            "cache_bytes": 3 * largest_bytes,
            "load_retry_s": 0.2,
            "slab_bytes": 2**15,
            "worker_wait_max_s": 3600.0,  # a request may wait for many a worker here, on a slow machine
        }
    )
    async with running_node(settings) as node:
        node.client.timeout = 600.0
        await node.hold(1, *instances(specs))
        storm = Storm(node, time.monotonic() + SOAK_S)
        cache = ModelCache(tmp_path / "host" / "models", settings.cache_bytes)
        clients = (storm.client(random.Random(seed), calm) for seed in range(6))
        await asyncio.gather(
            *clients, storm.killer(random.Random(50)), storm.filler(random.Random(51), cache, largest_bytes)
        )
        assert storm.seen["finished"] > 0, storm.seen
        await node.until(lambda: set(node.states().values()) == {"ready"})
        await node.until(node.idle)
        restarts = sum(worker.restarts_total for worker in node.agent.workers)
        log.info("soak over", took_s=SOAK_S, restarts=restarts, switches=node.agent.switches_total, **storm.seen)
