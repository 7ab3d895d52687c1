"""How old a standby is after a promotion: one that follows it, and one that cannot."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from pydantic import SecretStr

from controlplane.database_address import libpq_url
from controlplane.policies.replica_age import LogPosition, ReplicaAge
from controlplane.settings import Settings
from controlplane.store.log_position import read_log_position
from controlplane.store.session import Database, make_engine
from tests.controlplane.world import until
from tests.ops.local.test_postgres_cluster import Trio, trio_at

CLOCKS_APART_S = 10.0
"""By so much the age by commit times is higher, which is what an unproven standby has."""


@contextlib.contextmanager
def asked(url: str) -> Iterator[Database]:
    database = Database(make_engine(Settings(database_url=SecretStr(url))))
    yield database
    database.close()


def position(trio: Trio, region: str, *, user: str = "") -> LogPosition:
    url = trio.cluster.members[region].url("postgres")
    own, _, server = url.removeprefix("postgresql+psycopg://").partition("@")
    with asked(f"postgresql+psycopg://{user or own}@{server}") as database, database.transaction() as session:
        return read_log_position(session)


def age_s(trio: Trio, primary: str, standby: str, *, user: str = "") -> float:
    """The standby's age when it is asked a moment after the primary."""
    age, asked_s = ReplicaAge(), time.monotonic()
    age.note_primary(position(trio, primary), asked_s)
    age.note_replica(position(trio, standby, user=user), asked_s)
    return age.age_s(asked_s)


def test_a_standby_that_follows_a_promotion_is_in_step(tmp_path: Path) -> None:
    """Also for a role that is not told what is received, when the standby has written some of the new timeline."""
    with trio_at(tmp_path) as trio:
        trio.write(1)
        tell(trio, "us-east", "CREATE ROLE reader LOGIN PASSWORD 'read'")
        until(lambda: age_s(trio, "us-east", "us-central", user="reader:read") == 0.0)
        trio.kill("us-east")
        trio.fail_over("us-west", accept_loss=True)
        trio.write(2)
        until(lambda: age_s(trio, "us-west", "us-central") == 0.0)
        tell(trio, "us-west", "CHECKPOINT")
        until(lambda: age_s(trio, "us-west", "us-central") == 0.0)
        tell(trio, "us-central", "CHECKPOINT")
        until(lambda: age_s(trio, "us-west", "us-central", user="reader:read") == 0.0)


def test_a_standby_that_cannot_follow_a_promotion_is_not_in_step_though_it_is_further_on(tmp_path: Path) -> None:
    with trio_at(tmp_path) as trio:
        trio.write(1)
        trio.server("us-west").detach()
        for row in range(2, 20):
            trio.write(row)  # waits for us-central
        trio.kill("us-east")
        trio.server("us-west").promote()
        central, west = trio.server("us-central"), trio.server("us-west")
        central.follow(west, central.source())
        first, stuck = position(trio, "us-west"), position(trio, "us-central")
        assert (first.timeline, first.takes_writes) == ("00000002", True)
        assert (stuck.timeline, stuck.takes_writes) == ("00000001", False)
        assert stuck.bytes > first.bytes
        assert CLOCKS_APART_S <= age_s(trio, "us-west", "us-central") < math.inf


def tell(trio: Trio, region: str, statement: str) -> None:
    with psycopg.connect(libpq_url(trio.cluster.members[region].url("postgres")), autocommit=True) as connection:
        connection.execute(statement)
