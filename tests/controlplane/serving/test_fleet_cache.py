"""What a gateway remembers of the fleet: tokens just sent, and a view that outlives Redis for a while."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import pairwise

import anyio
import pytest
import structlog.testing
from redis import Redis
from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError, UnknownModelError
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.regional_reads import RegionalReads
from controlplane.settings import Settings
from controlplane.store.fleet import Catalog, load_catalog
from controlplane.store.redis.live import FleetView, LiveStore, SentElsewhere, Sums
from tests.controlplane.world import PATIENCE_S, World
from tests.event_loop import asynchronous, until


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


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges may take long and count all the same."""
    monkeypatch.setattr("controlplane.serving.fleet_cache._HEARD_SOON_S", PATIENCE_S)


@pytest.mark.usefixtures("busy_machine")
@asynchronous
async def test_gateways_count_what_the_others_have_sent_since_the_last_report(world: World) -> None:
    quick = world.settings.model_copy(update={"sent_share_every_s": 0.01, "view_refresh_s": 0.01})
    alone = world.settings.model_copy(update={"sent_share_every_s": 0.0})
    reads = RegionalReads(world.database, world.settings)
    one, other, deaf = (FleetCache(reads, world.live, each) for each in (quick, quick, alone))
    world.report("n1", "i1", region="us-east", url="http://n1")
    async with one.following(), other.following(), deaf.following():
        other.note_sent("i1", 1)
        refused = one.note_sent("i1", 100, 60)
        one.note_sent("i1", 20, 10)
        await until(lambda: sent(other) == 121)
        (seen,) = other.instances()
        assert (seen.sent_input_tokens, seen.sent_requests) == (70, 3)
        one.note_refused("i1", refused)
        await until(lambda: sent(other) == 21)
        await until(lambda: sent(one) == 21)
        assert sent(deaf) == 0
        world.report("n1", "i1", region="us-east", url="http://n1")
        await until(lambda: sent(other) == 0)
        await until(lambda: sent(one) == 0)


class ToldLive(LiveStore):
    """A Redis in which others tell that they sent 7 tokens to i1, `ahead_s` in the future, by exchanges that take so
    long; the first `away` of them fail. `heard`: what this process told in each. No view is read while it is `blind`.
    """

    ahead_s, takes_s, away, blind = 0.0, 0.0, 0, False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.heard: list[Mapping[str, Sums]] = []

    def read_view(self) -> FleetView:
        if self.blind:
            raise UnavailableError("Redis does not answer")
        return super().read_view()

    def exchange_sent(
        self, process: str, sent: Mapping[str, Sums], *, after: str, now_s: float
    ) -> tuple[str, list[SentElsewhere]]:
        self.heard.append(sent)
        if len(self.heard) <= self.away:
            raise UnavailableError("Redis does not answer")
        time.sleep(self.takes_s)
        told = SentElsewhere(at_s=now_s + self.ahead_s, instances={"i1": Sums(7, 7, 1)})
        return after, [told] if len(self.heard) == self.away + 1 else []

    async def exchanged(self, count: int) -> None:
        """Wait until so many exchanges have begun, and those before them were counted."""
        await until(lambda: len(self.heard) >= count)


@pytest.fixture
def told(world: World) -> Iterator[tuple[FleetCache, ToldLive]]:
    """A cache that exchanges often and has one instance, and its Redis."""
    quick = world.settings.model_copy(update={"sent_share_every_s": 0.01, "view_refresh_s": 0.05})
    with closing(ToldLive(world.settings)) as live:
        world.report("n1", "i1", region="us-east", url="http://n1")
        yield FleetCache(RegionalReads(world.database, world.settings), live, quick), live


@pytest.mark.usefixtures("busy_machine")
def test_what_others_send_is_not_known_while_redis_is_away(told: tuple[FleetCache, ToldLive]) -> None:
    cache, live = told
    live.away = 2

    @asynchronous
    async def run() -> None:
        async with cache.following():
            cache.note_sent("i1", 5)
            await live.exchanged(2)
            assert sent(cache) == 5, "its own counts all the same"
            await live.exchanged(4)
            assert sent(cache) == 12

    with structlog.testing.capture_logs() as logs:
        run()
    said = [line["event"] for line in logs if line.get("what") == "what others have sent"]
    assert said == ["a source is unavailable; its last copy is used", "a source is available again"]


@asynchronous
async def test_what_is_heard_late_does_not_count(told: tuple[FleetCache, ToldLive]) -> None:
    cache, live = told
    live.takes_s = 0.15
    async with cache.following():
        cache.note_sent("i1", 5)
        await live.exchanged(2)
        assert sent(cache) == 5


@pytest.mark.usefixtures("busy_machine")
@asynchronous
async def test_what_is_heard_while_no_report_is_read_does_not_count(told: tuple[FleetCache, ToldLive]) -> None:
    cache, live = told
    async with cache.following():
        live.blind = True
        for _ in range(2):
            await cache.changed()
        cache.note_sent("i1", 5)
        await live.exchanged(2)
        assert sent(cache) == 5


@asynchronous
async def test_who_sends_nothing_asks_nothing(told: tuple[FleetCache, ToldLive]) -> None:
    cache, live = told
    async with cache.following():
        for _ in range(3):
            await cache.changed()
        assert live.heard == []
        cache.note_sent("i1", 5)
        await live.exchanged(1)


@pytest.mark.usefixtures("busy_machine")
@asynchronous
async def test_a_clock_that_was_set_back_makes_nothing_count_for_ever(
    told: tuple[FleetCache, ToldLive], world: World
) -> None:
    cache, live = told
    live.ahead_s = 600.0
    async with cache.following():
        cache.note_sent("i1", 5)
        await live.exchanged(2)
        assert sent(cache) == 12
        world.report("n1", "i1", region="us-east", url="http://n1")
        await until(lambda: sent(cache) == 0)


@asynchronous
async def test_what_ends_after_its_report_is_not_told(told: tuple[FleetCache, ToldLive], world: World) -> None:
    cache, live = told
    async with cache.following():
        sending = cache.note_sent("i1", 5)
        await live.exchanged(1)
        await anyio.sleep(0.2)  # longer than it takes to read a view
        world.report("n1", "i1", region="us-east", url="http://n1")
        for _ in range(2):
            await cache.changed()
        cache.note_refused("i1", sending)
        await live.exchanged(len(live.heard) + 2)
    assert [each for each in live.heard if each] == [{"i1": Sums(5, 0, 1)}]


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

    def read(session: Session, **named: float) -> Catalog:
        time.sleep(0.02)
        catalog = load_catalog(session, **named)
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
