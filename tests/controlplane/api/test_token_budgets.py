"""Budgets of tokens: gateways reserve blocks of them, and never overrun them together."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import SecretStr

from controlplane.api.metrics import Metrics
from controlplane.api.token_budgets import TokenBudgets
from controlplane.errors import InsufficientQuotaError, UnavailableError
from controlplane.policies.token_budgets import Budget
from controlplane.settings import Settings
from controlplane.store.session import Database, make_engine
from controlplane.store.tenants import Tenant, put_tenant
from controlplane.store.token_budgets import TokenBudgetRow, forget_budgets, period_of, reserve_block, reserved_now
from ops.local.ports import free_port
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.gateway import assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World


def limit(database: Database, **limits: int) -> None:
    with database.transaction() as session:
        put_tenant(session, Tenant(name="acme", **limits))


def reserved(database: Database) -> dict[Budget, int]:
    with database.transaction() as session:
        return reserved_now(session, "acme", datetime.now(UTC))


def test_a_request_beyond_the_budget_is_refused_as_clients_expect(world: World) -> None:
    limit(world.database, tokens_per_month=1800)
    with running_gateway(world, FakeAgent()) as gateway:
        assert gateway.chat(max_tokens=1500).status_code == 200
        assert gateway.chat(max_tokens=1500).status_code == 200, "10 tokens were used, not 1501"
        refused = gateway.chat(429, max_tokens=1700)
        error = assert_error(refused)
        assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert "tenant 'acme'" in error["message"]
        assert "(tokens_per_month) has too few tokens left for a request that may take 1976;" in error["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert "tidepool_budget_refusals_total 1.0" in gateway.http.get("/metrics").text
        limit(world.database, tokens_per_minute=10**6)
        stranger = gateway.client_of(world.key(tenant="other"))
        assert stranger.chat.completions.create(model="tide", messages=[{"role": "user", "content": "hi"}]).choices
        assert reserved(world.database)[Budget.MONTH] > 20
    assert reserved(world.database) == {Budget.MONTH: 20}, "a gateway that ends returns what it did not use"


def test_gateways_never_overrun_a_budget_together(database: Database, settings: Settings) -> None:
    limit(database, tokens_per_day=20_000, tokens_total=30_000)
    chance = random.Random(5)

    async def run() -> int:
        keepers = [TokenBudgets(database, Metrics(), settings) for _ in range(4)]
        used = 0

        async def ask(keeper: TokenBudgets) -> None:
            nonlocal used
            tokens = chance.choice((1, 50, 400))
            try:
                held = await keeper.take("acme", tokens)
            except InsufficientQuotaError:
                return
            spent = chance.randint(0, tokens)
            used += spent
            await asyncio.sleep(0)
            held.left += tokens - spent

        for turn in range(60):
            await asyncio.gather(*(ask(chance.choice(keepers)) for _ in range(5)))
            if turn % 10 == 5:  # one is killed, and one is idle
                keepers[chance.randrange(4)] = TokenBudgets(database, Metrics(), settings)
                await chance.choice(keepers).give_back(idle_s=-1.0)
            assert used <= min(reserved(database).values()) <= 20_000
        for keeper in keepers:
            await keeper.give_back(idle_s=-1.0)
        return used

    used = asyncio.run(run())
    counted = reserved(database)
    assert counted[Budget.DAY] == counted[Budget.TOTAL]
    assert 10_000 < used <= counted[Budget.DAY] <= 20_000


def test_while_postgres_is_away_what_is_reserved_is_spent(database: Database, settings: Settings) -> None:
    limit(database, tokens_total=100_000)
    nowhere = SecretStr(f"postgresql+psycopg://postgres@127.0.0.1:{free_port()}/tidepool")
    away = Database(make_engine(settings.model_copy(update={"database_url": nowhere, "database_timeout_s": 2})))

    async def run() -> None:
        keeper = TokenBudgets(database, Metrics(), settings)
        await keeper.take("acme", 100)
        keeper.database = away
        for _ in range(9):
            await keeper.take("acme", 100)
        with pytest.raises(UnavailableError, match="budget of tenant 'acme' are used up"):
            await keeper.take("acme", 1)
        keeper.database = database
        keeper._away_until_s = 0.0  # a second later
        await keeper.take("acme", 1)

    asyncio.run(run())
    away.close()
    assert reserved(database) == {Budget.TOTAL: 2000}


def test_a_block_of_a_period_that_ended_is_returned_to_its_own(database: Database, settings: Settings) -> None:
    limit(database, tokens_per_day=10_000, tokens_total=10_000)

    async def run() -> None:
        keeper = TokenBudgets(database, Metrics(), settings)
        held = await keeper.take("acme", 10)
        held.ends_s = 0.0  # midnight
        other = await keeper.take("acme", 10)
        assert other is not held
        await keeper.give_back(idle_s=3600.0)

    asyncio.run(run())
    assert reserved(database) == {Budget.DAY: 110, Budget.TOTAL: 110}


def test_what_a_long_request_leaves_is_returned_though_its_block_was_before(
    database: Database, settings: Settings
) -> None:
    limit(database, tokens_total=100_000)

    async def run() -> None:
        keeper = TokenBudgets(database, Metrics(), settings)
        caller, query = SimpleNamespace(tenant="acme"), SimpleNamespace(tokens_max=5000, used_tokens=300)

        async def answer() -> AsyncIterator[Any]:
            await keeper.give_back(idle_s=-1.0)  # nothing else of this tenant's came meanwhile
            yield "token"

        spent = keeper.spent(cast("Any", caller), cast("Any", query), cast("Any", answer()))
        assert [each async for each in spent] == ["token"]
        assert reserved(database) == {Budget.TOTAL: 5000}
        await keeper.give_back(idle_s=-1.0)

    asyncio.run(run())
    assert reserved(database) == {Budget.TOTAL: 300}


def test_periods_begin_and_end_in_utc(database: Database, settings: Settings) -> None:
    at = datetime(2026, 12, 31, 23, 59, tzinfo=UTC)
    year = datetime(2027, 1, 1, tzinfo=UTC)
    assert period_of(Budget.DAY, at) == (datetime(2026, 12, 31, tzinfo=UTC), year)
    assert period_of(Budget.MONTH, at) == (datetime(2026, 12, 1, tzinfo=UTC), year)
    assert period_of(Budget.TOTAL, at)[1] is None
    limit(database, tokens_per_month=100, tokens_total=100)
    with database.transaction() as session:
        reserve_block(session, "acme", 10, settings)
        for row in session.query(TokenBudgetRow).filter_by(budget="tokens_per_month"):
            row.starts_at = datetime(2020, 1, 1, tzinfo=UTC)
    with database.transaction() as session:
        assert forget_budgets(session, keep_s=0.0, count_max=10) == 1
    assert reserved(database) == {Budget.TOTAL: 10}


def test_budgets_are_shown_and_checked(ask: Ask, world: World, settings: Settings) -> None:
    for bad in ({"tokens_per_day": 0}, {"tokens_total": "many"}):
        error = ask("PUT", "/admin/tenants/acme", json=bad, role="admin", status=400)
        assert error["param"] == next(iter(bad))
    body: dict[str, Any] = {"tokens_per_day": 1000, "tokens_total": 5000}
    assert body.items() <= ask("PUT", "/admin/tenants/acme", json=body, role="admin").items()
    with world.database.transaction() as session:
        reserve_block(session, "acme", 7, settings)
    shown = ask("GET", "/admin/tenants/acme")
    assert shown["tokens_reserved"] == {"tokens_per_day": 10, "tokens_total": 10}
