"""Postgres goes away while batch requests run, and comes back: each has its result exactly once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

import migrations
from controlplane.settings import Settings
from controlplane.store.blobs.open import open_blobs
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from tests.controlplane.dispatcher.test_dispatcher import dispatchers, ended, holds, lines_of
from tests.controlplane.world import FakeAgent, World, served
from tests.servers import Servers

_LINES = 3


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    migrations.upgrade(servers.postgres.url())
    yield servers
    servers.close()


@pytest.fixture
def world(servers: Servers, tmp_path: Path) -> Iterator[World]:
    """A world on these servers, where reading what was read before takes no Postgres."""
    settings = Settings(
        database_url=SecretStr(servers.postgres.url()), redis_url=SecretStr(servers.redis.url()), home=tmp_path
    )
    database, live = Database(make_engine(settings)), LiveStore(settings)
    yield World(database, live, settings)
    live.close()
    database.close()


def test_results_of_running_lines_wait_for_the_primary(world: World, servers: Servers) -> None:
    """The nodes answer while it is away for longer than the leases; nobody is asked twice, and no line has two."""
    agent = FakeAgent(then="held")

    async def run() -> Any:
        async with dispatchers(world, count=2, niw_lease_s=5):
            await holds(lambda: len(agent.asked) == _LINES)
            await asyncio.to_thread(servers.stop, "postgres")
            with capture_logs() as logs:
                agent.freed.set()
                await holds(lambda: any(line["event"] == "results wait for Postgres" for line in list(logs)))
                await holds(lambda: any(line.get("what") == "renew" for line in list(logs)))
            await asyncio.to_thread(servers.start, "postgres")
            return await ended(world, batch_id)

    with served(agent.app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=_LINES)
        batch = asyncio.run(run())
    assert (batch.state, batch.completed, batch.failed) == ("completed", _LINES, 0)
    found = lines_of(open_blobs(world.settings), batch.output_file_id)
    assert sorted(line["custom_id"] for line in found) == sorted(f"c{number}" for number in range(1, _LINES + 1))
    assert [asked.epoch for asked in agent.asked] == [1] * _LINES
