"""Counts that gateways share: the script in Redis decides as the policy does, for all of them together."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uuid_utils
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from pydantic import SecretStr
from redis.exceptions import ConnectionError as RedisGone
from redis.exceptions import TimeoutError as RedisTimeout

from controlplane.errors import UnavailableError
from controlplane.policies.limits import Limit, TenantLimits, Usage, choose_admission
from controlplane.settings import Settings
from controlplane.store.redis.limits import Charge, LimitStore, connect
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import PATIENCE_S

pytestmark = pytest.mark.anyio
maybe = st.none() | st.integers(1, 40)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def store_of(settings: Settings) -> AsyncIterator[LimitStore]:
    store = LimitStore(settings.model_copy(update={"limit_timeout_s": PATIENCE_S}))
    yield store
    await store.close()


def charge(limits: TenantLimits, tokens: int = 1, *, tenant: str = "acme", lease: str = "one") -> Charge:
    return Charge(tenant=tenant, limits=limits, tokens=tokens, lease=lease)


@hypothesis(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=maybe, tokens=maybe, at_once=maybe, asks=st.lists(st.tuples(st.integers(1, 30), st.booleans())))
def test_redis_decides_as_the_policy_does(
    settings: Settings, requests: int | None, tokens: int | None, at_once: int | None, asks: list[tuple[int, bool]]
) -> None:
    limits = TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_max=at_once)

    async def compare() -> None:
        tenant, usage, running = uuid_utils.uuid7().hex, Usage(), 0
        async with store_of(settings) as store:
            for number, (asked, ends) in enumerate(asks):
                one = charge(limits, asked, tenant=tenant, lease=str(number))
                told = await store.admit(one)
                now_s = next((b.at_s for b in (told.usage.requests, told.usage.tokens) if b is not None), 0.0)
                expected = choose_admission(replace(usage, running=running), asked, limits, now_s)
                assert told.refused == expected.refused
                for ours, theirs in (
                    (expected.usage.requests, told.usage.requests),
                    (expected.usage.tokens, told.usage.tokens),
                ):
                    assert (ours is None) == (theirs is None)
                    if ours is not None and theirs is not None:
                        assert ours.level == pytest.approx(theirs.level, abs=1e-3)
                usage = told.usage
                if told.refused is None:
                    running += 1 if at_once is not None else 0
                    if ends:
                        await store.settle(one, used_tokens=asked)
                        running -= 1 if at_once is not None else 0

    asyncio.run(compare())


@pytest.mark.usefixtures("redis_clock")
async def test_two_gateways_share_one_count(settings: Settings) -> None:
    limits = TenantLimits(requests_per_minute=3, concurrent_max=2)
    async with store_of(settings) as one, store_of(settings) as other:
        assert (await one.admit(charge(limits, lease="a"))).refused is None
        second = await other.admit(charge(limits, lease="b"))
        assert second.refused is None
        assert second.usage.requests is not None
        assert second.usage.requests.level == 1
        assert (await one.admit(charge(limits, lease="c"))).refused == Limit.RUNNING
        assert (await one.admit(charge(limits, tenant="other", lease="d"))).refused is None
        await other.settle(charge(limits, lease="b"), used_tokens=1)
        assert (await one.admit(charge(limits, lease="e"))).refused is None
        await one.settle(charge(limits, lease="e"), used_tokens=1)
        assert (await other.admit(charge(limits, lease="f"))).refused == Limit.REQUESTS


async def test_tokens_are_corrected_by_what_was_used(settings: Settings, redis_clock: RedisClock) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    async with store_of(settings) as store:
        await store.admit(charge(limits, 600))
        await store.settle(charge(limits, 600), used_tokens=100)
        left = (await store.admit(charge(limits, 1))).usage.tokens
        assert left is not None
        assert left.level == 899
        redis_clock.move(6)
        await store.settle(charge(limits, 1), used_tokens=5000)
        broke = await store.admit(charge(limits, 1))
        assert broke.refused == Limit.TOKENS
        assert broke.usage.tokens is not None
        assert broke.usage.tokens.level == 999 + 1 - 5000, "a tenth of a minute's tokens came back"


async def test_a_lease_that_nobody_renews_ends(settings: Settings, redis_clock: RedisClock) -> None:
    limits = TenantLimits(concurrent_max=2)
    async with store_of(settings.model_copy(update={"limit_lease_s": 10.0})) as dead, store_of(settings) as alive:
        await dead.admit(charge(limits, lease="dead"))
        await alive.admit(charge(limits, lease="alive"))
        assert (await alive.admit(charge(limits, lease="new"))).refused == Limit.RUNNING
        redis_clock.move(9)
        assert (await alive.admit(charge(limits, lease="new"))).refused == Limit.RUNNING
        redis_clock.move(1)
        assert (await alive.admit(charge(limits, lease="new"))).refused is None
        assert (await alive.admit(charge(limits, lease="more"))).refused == Limit.RUNNING, "what is alive counts on"


async def test_what_redis_forgot_is_there_again_when_renewed(settings: Settings) -> None:
    limits = TenantLimits(concurrent_max=1)
    async with store_of(settings) as store:
        await store.renew({"acme": ["a"]})
        assert (await store.admit(charge(limits, lease="b"))).refused == Limit.RUNNING
        await store.drop("acme", ["a"])
        assert (await store.admit(charge(limits, lease="b"))).refused is None


async def test_gateways_are_counted(settings: Settings) -> None:
    async with store_of(settings) as store:
        assert [await store.count_gateways(name) for name in ("a", "b", "a")] == [1, 2, 2]


async def test_redis_away_is_said(settings: Settings) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        async with store_of(settings.model_copy(update={"redis_url": SecretStr(url)})) as store:
            with pytest.raises(UnavailableError):
                await store.admit(charge(TenantLimits(concurrent_max=1)))


async def test_a_call_without_an_answer_is_not_repeated(settings: Settings) -> None:
    """A script that has run would charge, or refund, twice. Where the connection is gone, it has not run."""
    client = connect(settings)
    for error, calls in ((RedisTimeout("no answer"), 1), (RedisGone("closed"), 2)):
        made = 0

        async def call(error: Exception = error) -> None:
            nonlocal made
            made += 1
            raise error

        async def failed(_: Exception) -> None:
            pass

        with pytest.raises(type(error)):
            await client.get_connection_kwargs()["retry"].call_with_retry(call, failed)
        assert made == calls
    await client.aclose()
