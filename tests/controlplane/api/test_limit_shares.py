"""Two regions, each with a Redis of its own, and one Postgres that may be away."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr, ValidationError
from sqlalchemy import update

from controlplane.api.limit_shares import RegionShares
from controlplane.api.metrics import Metrics
from controlplane.errors import UnavailableError
from controlplane.policies import limit_shares
from controlplane.policies.limit_shares import ShareReport
from controlplane.policies.limits import Limit, TenantLimits
from controlplane.settings import Settings
from controlplane.store.limit_shares import LimitShareRow, grant_shares, shares_of
from controlplane.store.redis.limit_shares import ShareStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tenants import Tenant, put_tenant
from ops.local.ports import free_port
from tests.controlplane.api.gateway import assert_error, running_gateway
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import PATIENCE_S, FakeAgent, World

pytestmark = pytest.mark.anyio
OTHER_REDIS_DATABASE = 13
LIMITS = TenantLimits(requests_per_minute=100, tokens_per_minute=10_000, concurrent_max=10)
AWAY = SecretStr(f"postgresql+psycopg://postgres@127.0.0.1:{free_port()}/tidepool")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def region(settings: Settings, name: str, database: Database, *, is_other: bool) -> AsyncIterator[RegionShares]:
    address = settings.redis_url.get_secret_value()
    if is_other:
        address = f"{address.rsplit('/', 1)[0]}/{OTHER_REDIS_DATABASE}"
    changes = {
        "redis_url": SecretStr(address),
        "limit_timeout_s": PATIENCE_S,
        "key_wait_s": PATIENCE_S,
        "limit_share_every_s": 0.001,
    }
    own = settings.model_copy(update=changes)
    shares = RegionShares(name, ShareStore(own), database, Metrics(), own)
    await shares.store._redis.flushdb()
    yield shares
    await shares.store.close()


@asynccontextmanager
async def two_regions(settings: Settings, database: Database) -> AsyncIterator[tuple[RegionShares, RegionShares]]:
    with database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=100, tokens_per_minute=10_000, concurrent_max=10))
    async with (
        region(settings, "north", database, is_other=False) as north,
        region(settings, "south", database, is_other=True) as south,
    ):
        yield north, south


async def requests_of(shares: RegionShares) -> int | None:
    return (await shares.within("acme", LIMITS, tokens=100)).requests_per_minute


async def test_a_limit_is_divided_between_regions(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_regions(settings, database) as (north, south):
        assert await north.within("acme", LIMITS, tokens=100) == LIMITS, "a region alone has all of it"
        assert await south.within("acme", LIMITS, tokens=100) == TenantLimits(
            requests_per_minute=0, tokens_per_minute=0, concurrent_max=0
        )
        await north.renew()
        least = await requests_of(north)
        assert least is not None
        assert least < 100
        await north.renew()
        await south.renew()
        assert await requests_of(south) == 0, "what north gave up rests until it is refilled"
        monkeypatch.setattr(limit_shares, "REST_S", -1.0)
        for _ in range(3):
            await north.renew()
            await south.renew()
        shares = [await requests_of(north), await requests_of(south)]
        assert sum(filter(None, shares)) <= 100
        assert min(filter(None, shares)) >= 10
        assert all(shares)
        assert await north.within("free", TenantLimits(), tokens=1) == TenantLimits()


async def test_shares_stay_while_postgres_is_away_and_a_new_tenant_is_told(
    settings: Settings, database: Database
) -> None:
    async with two_regions(settings, database) as (north, _):
        assert await requests_of(north) == 100
        away = Database(make_engine(settings.model_copy(update={"database_url": AWAY, "database_timeout_s": 2})))
        north.database = away
        with pytest.raises(Exception, match="refused"):
            await north.renew()
        await north.read()
        assert await requests_of(north) == 100
        with pytest.raises(UnavailableError, match="region 'north' has no share of the limits of tenant 'new' yet"):
            await north.within("new", LIMITS, tokens=1)
        away.close()


async def test_a_redis_that_lost_its_memory_is_told_its_share_again(settings: Settings, database: Database) -> None:
    async with two_regions(settings, database) as (north, south):
        assert await requests_of(north) == 100
        await north.store._redis.flushdb()
        await north.read()
        await south.renew()
        assert await requests_of(north) == 100
        assert await requests_of(south) == 0


async def test_a_gateway_that_was_slow_puts_no_share_over_a_newer_one(settings: Settings, database: Database) -> None:
    async with two_regions(settings, database) as (north, _):
        await requests_of(north)
        old = await north.store.read()
        await north.renew()
        newer = await north.store.read()
        assert newer.shares["acme"] != old.shares["acme"]
        await north.store.put(old.shares, before=old.shares)
        assert (await north.store.read()).shares == newer.shares


def test_shares_need_a_region() -> None:
    with pytest.raises(ValidationError, match="limit_shares needs region"):
        Settings(limit_shares=True)


def test_a_gateway_admits_within_its_regions_share(world: World, redis_clock: RedisClock) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=100, tokens_per_minute=4000))
        reports = {"acme": {kind: ShareReport(version=None, applied=0, demand=0.0) for kind in Limit}}
        other = grant_shares(session, "south", reports, world.settings)["acme"]
        session.execute(update(LimitShareRow).values(held=90, granted=90).where(LimitShareRow.kind == "requests"))
        session.execute(update(LimitShareRow).values(held=3000, granted=3000).where(LimitShareRow.kind == "tokens"))
    assert other[Limit.TOKENS].granted == 4000
    with running_gateway(world, FakeAgent(), region="north", limit_shares=True, limit_share_every_s=30) as gateway:
        first = gateway.chat(max_tokens=50)
        assert first.headers["x-ratelimit-limit-requests"] == "10"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        redis_clock.move(60)
        assert gateway.chat(max_tokens=3000).headers["x-ratelimit-remaining-tokens"] == "0", "it takes all of the share"
        for _ in range(9):
            gateway.chat(max_tokens=10)
        refused = assert_error(gateway.chat(429, max_tokens=10))
        assert "10 requests per minute (the share of region 'north' now)" in refused["message"]
        assert "tidepool_limit_shares 2.0" in gateway.http.get("/metrics").text
        shown = {row.region: row.granted for row in _requests_shares(world)}
        assert shown == {"north": 10, "south": 90}


def test_a_region_without_any_share_refuses_and_says_so(world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", concurrent_max=2))
        reports = {"acme": {Limit.RUNNING: ShareReport(version=None, applied=0, demand=0.0)}}
        grant_shares(session, "south", reports, world.settings)
    patient = {"limit_share_every_s": 30, "key_wait_s": PATIENCE_S}
    with running_gateway(world, FakeAgent(), region="north", limit_shares=True, **patient) as gateway:
        refused = gateway.chat(429)
        assert "0 requests at once (the share of region 'north' now)" in assert_error(refused)["message"]
        assert refused.headers["retry-after"] == "1"


def _requests_shares(world: World) -> list[LimitShareRow]:
    with world.database.transaction() as session:
        return [row for row in shares_of(session, "acme") if row.kind == "requests"]
