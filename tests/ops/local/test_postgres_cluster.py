"""Three servers of Postgres on one machine lose their primary, and it comes back."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import AdminShutdown, ConnectionFailure, ObjectNotInPrerequisiteState

from controlplane.database_address import libpq_url
from ops.failover import members
from ops.failover.members import Member, ask_members, members_of, without_secrets
from ops.failover.run import RefusedError, decide, fail_over
from ops.local.postgres_cluster import PostgresCluster, regions_at
from ops.local.supervisor import Supervisor
from tests.controlplane.world import until

REGIONS = ("us-east", "us-central", "us-west")


class Trio:
    """The servers, each under a supervisor of its own."""

    def __init__(self, home: Path) -> None:
        self.cluster = PostgresCluster(home, REGIONS, fsync=False)
        self.first: list[str] = []
        self.reported: list[str] = []
        self.cluster.prepare(self.first.append)
        self.running = {region: Supervisor(self.cluster.children(region)) for region in REGIONS}
        for supervisor in self.running.values():
            supervisor.start()

    def write(self, row: int) -> None:
        """Commits only when a second region has it."""
        with psycopg.connect(
            libpq_url(self.cluster.url("us-west")), options="-c statement_timeout=60000"
        ) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS written (row int)")
            connection.execute("INSERT INTO written VALUES (%s)", [row])

    def rows(self) -> list[int]:
        with psycopg.connect(libpq_url(self.cluster.url("us-west"))) as connection:
            return [row[0] for row in connection.execute("SELECT row FROM written ORDER BY row")]

    def primaries(self) -> list[str | None]:
        facts = ask_members(members_of(self.cluster.url("us-west")))
        return [one.region for one in facts if one.takes_writes]

    def fail_over(self, region: str, *, accept_loss: bool = False) -> None:
        fail_over(self.cluster.url("us-west"), region, accept_loss=accept_loss, report=self.reported.append)

    def server(self, region: str) -> Member:
        return members_of(self.cluster.members[region].url("postgres"))[0]

    def kill(self, region: str) -> None:
        self.running.pop(region).kill()

    def revive(self, region: str) -> None:
        self.running[region] = Supervisor(self.cluster.children(region))
        self.running[region].start()

    def stop(self) -> None:
        for supervisor in self.running.values():
            supervisor.stop()


@contextlib.contextmanager
def trio_at(home: Path) -> Iterator[Trio]:
    trio = Trio(home)
    try:
        yield trio
    finally:
        trio.stop()


def test_nothing_acknowledged_is_lost_with_its_primary_which_rejoins_by_itself(tmp_path: Path) -> None:
    with trio_at(tmp_path) as trio:
        assert regions_at(tmp_path) == tuple(sorted(REGIONS))
        assert len(trio.first) == 1
        trio.write(1)
        with pytest.raises(RefusedError, match=r"us-east .* takes writes: stop it first"):
            trio.fail_over("us-west", accept_loss=True)
        trio.kill("us-east")
        assert trio.cluster.primary() is None, "one that is silent follows nobody"
        best = decide(trio.cluster.url("us-west"), "us-west")
        chosen = "us-central" if best.losses else "us-west"
        trio.fail_over(chosen)
        trio.write(2)
        trio.revive("us-east")
        assert trio.primaries() == [chosen]
        assert trio.cluster.primary() == chosen
        trio.kill("us-west" if chosen == "us-central" else "us-central")
        trio.write(3)  # waits for the one that came back
        assert trio.rows() == [1, 2, 3]
    with trio_at(tmp_path) as again:
        assert len(again.first) == 1, "a new release migrates it, and a lost file of keys gets its keys"
        assert again.primaries() == [chosen]
        assert again.rows() == [1, 2, 3]


def test_two_lost_servers_may_hold_what_the_third_lacks(tmp_path: Path) -> None:
    with trio_at(tmp_path) as trio:
        trio.write(1)
        trio.kill("us-east")
        trio.kill("us-central")
        with pytest.raises(RefusedError, match=r"may be on silent ones alone\. To take that: --accept-loss"):
            trio.fail_over("us-west")
        assert trio.primaries() == []
        trio.fail_over("us-west", accept_loss=True)
        assert trio.primaries() == ["us-west"]


def test_a_standby_that_lacks_what_another_has_of_a_newer_timeline_is_refused(tmp_path: Path) -> None:
    """The last checkpoint of the one that followed the first failover is of the older timeline for minutes."""
    with trio_at(tmp_path) as trio:
        trio.write(1)
        trio.kill("us-east")
        best = decide(trio.cluster.url("us-west"), "us-west")
        second, third = ("us-central", "us-west") if best.losses else ("us-west", "us-central")
        trio.fail_over(second)
        trio.revive("us-east")  # rewound, so that its checkpoint is of the newer timeline
        trio.server("us-east").detach()  # as when its link to the primary is cut
        trio.write(2)  # waits for the third
        trio.kill(second)
        with pytest.raises(RefusedError, match=rf"region {third} has \d+ bytes .* that us-east lacks: promote {third}"):
            trio.fail_over("us-east")
        trio.fail_over(third)
        assert trio.rows() == [1, 2]


def test_a_failover_that_is_interrupted_or_fails_leaves_no_standby_detached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio_at(tmp_path) as trio:
        trio.write(1)
        before = {region: trio.server(region).source() for region in ("us-central", "us-west")}
        trio.kill("us-east")

        def interrupted(standby: Member) -> None:
            detach(standby)
            raise KeyboardInterrupt

        detach = Member.detach
        monkeypatch.setattr(Member, "detach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trio.fail_over("us-west", accept_loss=True)
        assert {region: trio.server(region).source() for region in before} == before

        def killed(standby: Member) -> float:
            trio.kill("us-west")
            raise TimeoutError(f"{standby.address} is no primary")

        monkeypatch.setattr(Member, "detach", detach)
        monkeypatch.setattr(Member, "promote", killed)
        with pytest.raises(TimeoutError, match="is no primary"):
            trio.fail_over("us-west", accept_loss=True)
        assert trio.server("us-central").source() == before["us-central"]
        secret = conninfo_to_dict(before["us-west"])["password"]
        (told,) = [line for line in trio.reported if "receives from nobody" in line]
        assert told.startswith(trio.server("us-west").address)
        assert f"port={trio.cluster.members['us-east'].port}" in told
        assert str(secret) not in told


class Promoting:
    """Connections to a server that says no to a promotion, or answers it with `error`. `primary_at`: at which look it
    is the primary after all; None: at none.
    """

    def __init__(self, *, error: BaseException | None, primary_at: int | None) -> None:
        self.error, self.primary_at = error, primary_at
        self.looks = 0
        self.row: tuple[object, ...] = ()

    def __enter__(self) -> "Promoting":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def execute(self, query: str, _: object = None) -> "Promoting":
        if "pg_promote" in query and self.error is not None:
            raise self.error
        self.looks += "pg_is_in_recovery" in query
        answers = {"pg_promote": (False,), "pg_ls_waldir": (2,)}
        facts = ("us-west", "", self.primary_at is not None and self.looks >= self.primary_at, 2, 0, None)
        self.row = next((row for word, row in answers.items() if word in query), facts)
        return self

    def fetchone(self) -> tuple[object, ...]:
        return self.row


def promote(monkeypatch: pytest.MonkeyPatch, server: Promoting) -> float:
    monkeypatch.setattr(Member, "_connect", lambda _: server)
    return Member(address="a:5432", parameters={}).promote()


CUTS = (psycopg.OperationalError("was cut"), AdminShutdown("was cut"), ConnectionFailure("was cut"))


@pytest.mark.parametrize("error", CUTS)
def test_a_promotion_whose_connection_broke_is_waited_for(
    error: psycopg.Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_ASK_EVERY_S", 0.0)
    assert promote(monkeypatch, Promoting(error=error, primary_at=3)) >= 0.0
    monkeypatch.setattr(members, "PROMOTED_WITHIN_S", 0)
    with pytest.raises(psycopg.OperationalError, match="was cut"):
        promote(monkeypatch, Promoting(error=error, primary_at=None))


def test_an_interrupt_takes_no_promotion_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_ASK_EVERY_S", 0.0)
    assert promote(monkeypatch, Promoting(error=KeyboardInterrupt(), primary_at=3)) >= 0.0
    monkeypatch.setattr(members, "PROMOTED_WITHIN_S", 0)
    with pytest.raises(KeyboardInterrupt):
        promote(monkeypatch, Promoting(error=KeyboardInterrupt(), primary_at=None))


def test_a_promotion_that_succeeds_after_all_is_none_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert promote(monkeypatch, Promoting(error=None, primary_at=1)) >= 0.0
    said = "a:5432 was told to become the primary and is none after 60 s; it may become one yet"
    with pytest.raises(TimeoutError, match=said):
        promote(monkeypatch, Promoting(error=None, primary_at=None))


def test_a_server_that_is_a_primary_already_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Promoting(error=ObjectNotInPrerequisiteState("recovery is not in progress"), primary_at=1)
    with pytest.raises(ObjectNotInPrerequisiteState):
        promote(monkeypatch, server)


def test_an_address_is_shown_without_its_secrets() -> None:
    shown = without_secrets("host=a user=b password='it is' sslpassword=too application_name='us west'")
    assert conninfo_to_dict(shown) == {"host": "a", "user": "b", "application_name": "us west"}
    assert "secret" not in without_secrets("host=a password=secret unheard_of=c")


def test_a_user_who_lacks_pg_monitor_is_told_no_timeline_of_a_standby(tmp_path: Path) -> None:
    with trio_at(tmp_path) as trio:
        with psycopg.connect(libpq_url(trio.cluster.url("us-west"))) as connection:
            connection.execute("CREATE ROLE watcher LOGIN PASSWORD 'seen'")
        everyone = members_of(trio.cluster.url("us-west"))
        watcher = {"user": "watcher", "password": "seen"}
        as_watcher = [replace(one, parameters={**one.parameters, **watcher}) for one in everyone]
        until(lambda: all(one.region for one in ask_members(as_watcher)))
        told = ask_members(as_watcher)
        assert [one.timeline for one in told] == [1 if one.takes_writes else 0 for one in told]
