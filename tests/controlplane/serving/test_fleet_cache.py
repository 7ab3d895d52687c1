"""What a gateway remembers of the fleet: tokens just sent, and a view that outlives Redis for a while."""

import asyncio
import time
from itertools import pairwise

import anyio
import pytest
from redis import Redis
from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError, UnknownModelError
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.regional_reads import RegionalReads
from controlplane.store.fleet import Catalog, load_catalog
from controlplane.store.redis.live import FleetView, LiveStore
from tests.controlplane.world import PATIENCE_S, World


def sent(cache: FleetCache) -> int:
    return sum(instance.sent_tokens for instance in cache.instances())


def test_tokens_sent_are_forgotten_once_reported_even_when_sends_never_pause(world: World) -> None:
    cache = FleetCache(RegionalReads(world.database, world.settings), world.live, world.settings)

    def beat() -> None:
        world.report("n1", "i1", region="us-east", url="http://n1")
        cache.read_view()

    beat()
    for _ in range(5):  # three sends between two heartbeats, one right before each view is read
        for tokens in (100, 20, 3):
            cache.note_sent("i1", tokens)
            time.sleep(0.01)
        assert sent(cache) == 123, "only what came after the last heartbeat"
        beat()
    assert sent(cache) == 0
    cache.note_sent("gone", 5)
    assert sent(cache) == 0


def test_what_an_instance_refused_counts_no_more(world: World) -> None:
    cache = FleetCache(RegionalReads(world.database, world.settings), world.live, world.settings)
    world.report("n1", "i1", region="us-east", url="http://n1")
    cache.read_view()
    refused = cache.note_sent("i1", 100_000)
    cache.note_sent("i1", 20)
    for _ in range(2):
        cache.note_refused("i1", refused)
        assert sent(cache) == 20
    cache.note_refused("gone", refused)


def test_whoever_waits_for_a_change_hears_of_a_request_that_ended_and_of_each_view(world: World) -> None:
    async def run() -> None:
        quick = world.settings.model_copy(update={"view_refresh_s": 0.05})
        cache = FleetCache(RegionalReads(world.database, world.settings), world.live, quick)
        world.report("n1", "i1", region="us-east", url="http://n1")
        cache.read_view()
        sending = cache.note_sent("i1", 20)
        waiting = asyncio.create_task(cache.changed())
        await asyncio.sleep(0)
        cache.note_ended("i1", sending)
        await waiting
        assert sent(cache) == 0
        async with cache.following():
            with anyio.fail_after(PATIENCE_S):
                await cache.changed()

    anyio.run(run)


def test_facts_of_a_model_are_made_once_for_a_view(world: World) -> None:
    cache = FleetCache(RegionalReads(world.database, world.settings), world.live, world.settings)
    for number in (1, 2):
        world.report(f"n{number}", f"i{number}", region="us-east", url="http://n1")
    cache.read_view()
    model = cache.instances()[0].endpoint.model
    before = {each.instance_id: each for each in cache.instances(model)}
    sending = cache.note_sent("i1", 7, 3)
    now = {each.instance_id: each for each in cache.instances(model)}
    assert now["i2"] is before["i2"]
    assert (now["i1"].sent_tokens, now["i1"].sent_input_tokens) == (7, 3)
    cache.note_refused("i1", sending)
    assert {each.instance_id: each for each in cache.instances(model)} == before
    world.report("n2", "i2", region="us-east", url="http://n1", used=0.5)
    cache.read_view()
    assert {each.instance_id: each.kv_used_bytes for each in cache.instances(model)}["i2"] > 0
    assert cache.instances("another") == ()


class SwitchedLive(LiveStore):
    """A Redis that is unavailable while `away`."""

    away, reads = False, 0

    def read_view(self) -> FleetView:
        self.reads += 1
        if self.away:
            raise UnavailableError("Redis does not answer")
        return super().read_view()

    async def read_thrice(self) -> None:
        """Wait for two whole reads of the view."""
        until = self.reads + 3
        with anyio.fail_after(PATIENCE_S):
            while self.reads < until:  # noqa: ASYNC110  (another thread reads)
                await anyio.sleep(0.01)


def test_the_view_does_not_age_while_redis_is_away(world: World, redis_client: Redis) -> None:
    quick = world.settings.model_copy(update={"view_refresh_s": 0.05, "heartbeat_stale_s": 2.0})
    live = SwitchedLive(world.settings)

    async def run() -> None:
        cache = FleetCache(RegionalReads(world.database, world.settings), live, quick)
        world.report("n1", "i1", region="us-east", url="http://n1")
        async with cache.following():
            live.away = True
            await live.read_thrice()
            before = cache.instances()[0].age_s
            await live.read_thrice()
            assert cache.instances()[0].age_s == before
            assert cache.missing() == []
            redis_client.flushdb()
            live.away, began = False, time.monotonic()
            await live.read_thrice()
            assert cache.instances()[0].age_s <= time.monotonic() - began, "its silence begins anew"
            with anyio.fail_after(PATIENCE_S):
                while cache.instances():  # noqa: ASYNC110  (Redis has lost it, and it does not report again)
                    await anyio.sleep(0.05)

    anyio.run(run)
    live.close()


def test_made_up_names_share_a_read_and_reads_keep_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    every_s = 0.3
    cache = FleetCache(RegionalReads(world.database, world.settings), world.live, world.settings)
    reads: list[tuple[float, float]] = []

    def read(session: Session) -> Catalog:
        time.sleep(0.02)
        catalog = load_catalog(session)
        reads.append((cache._catalog_asked_s, time.monotonic()))
        return catalog

    monkeypatch.setattr("controlplane.serving.fleet_cache.load_catalog", read)
    monkeypatch.setattr("controlplane.serving.fleet_cache._LOOK_UP_EVERY_S", every_s)

    async def run() -> None:
        async def ask(name: str) -> None:
            with pytest.raises(UnknownModelError):
                await cache.model(name)

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(ask, f"made-up-{number}")
        assert len(reads) <= 2
        await ask("made-up")
        world.add_model("new")
        assert (await cache.model("new")).name == "new", "however lately another was looked up"

    anyio.run(run)
    for (before_s, ended_s), (asked_s, _) in pairwise(reads):
        assert asked_s >= ended_s
        assert asked_s - before_s >= every_s - 0.01, "but for the clock's steps"
