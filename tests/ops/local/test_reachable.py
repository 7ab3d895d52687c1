"""The database of a home for a command: of several regions, that of their primary, whether it runs or not."""

from pathlib import Path

import psycopg
import pytest

from controlplane.database_address import libpq_url
from controlplane.settings import Settings
from ops.client.home import EmbeddedError
from ops.local.reachable import reachable_database
from tests.ops.local.test_postgres_cluster import trio_at


def rows(settings: Settings) -> list[int]:
    with psycopg.connect(libpq_url(settings.database_url.get_secret_value())) as connection:
        return [row[0] for row in connection.execute("SELECT row FROM written ORDER BY row")]


def test_the_primary_of_several_regions_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEPOOL_DATABASE_URL", raising=False)
    with trio_at(tmp_path) as trio:
        trio.write(1)
        with reachable_database(tmp_path, new=False) as settings:
            assert rows(settings) == [1]
        trio.kill("us-east")
        with (
            pytest.raises(EmbeddedError, match=r"no Postgres takes writes \(in us-central, us-west\)"),
            reachable_database(tmp_path, new=False),
        ):
            pass
        trio.fail_over("us-west", accept_loss=True)
        trio.write(2)
    with reachable_database(tmp_path, new=False) as settings:
        assert rows(settings) == [1, 2], "the servers are stopped, and us-west was the last primary"
        with psycopg.connect(libpq_url(settings.database_url.get_secret_value())) as connection:
            connection.execute("INSERT INTO written VALUES (3)")  # waits for no standby
    with trio_at(tmp_path) as again:
        assert again.rows() == [1, 2, 3]
