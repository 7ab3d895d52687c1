"""Shares of limits in Postgres: regions that ask at once never hold more than the limit together."""

import threading

from controlplane.policies.limit_shares import ShareReport
from controlplane.policies.limits import Limit
from controlplane.settings import Settings
from controlplane.store.limit_shares import Grants, grant_shares, shares_of
from controlplane.store.session import Database
from controlplane.store.tenants import Tenant, put_tenant

NEW = ShareReport(version=None, applied=0, demand=0.0)


def ask(database: Database, settings: Settings, region: str, report: ShareReport = NEW, tenant: str = "acme") -> Grants:
    with database.transaction() as session:
        reports = {tenant: dict.fromkeys(Limit, report)}
        return grant_shares(session, region, reports, settings)


def test_a_region_alone_has_all_and_shares_when_another_asks(database: Database, settings: Settings) -> None:
    with database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=100, concurrent_max=10))
    first = ask(database, settings, "north")["acme"]
    assert {kind: share.granted for kind, share in first.items()} == {Limit.REQUESTS: 100, Limit.RUNNING: 10}
    assert ask(database, settings, "south")["acme"][Limit.REQUESTS].granted == 0, "all of it is held"
    second = ask(database, settings, "north")["acme"][Limit.REQUESTS]
    assert (second.granted, second.held) == (50, 100), "it did not say that it applies less"
    applies = ShareReport(version=second.version, applied=50, demand=0.0)
    assert ask(database, settings, "north", applies)["acme"][Limit.REQUESTS].held == 50
    assert ask(database, settings, "south")["acme"][Limit.REQUESTS].granted == 50
    with database.transaction() as session:
        kept = [(row.kind, row.region, row.granted) for row in shares_of(session, "acme") if row.kind == "requests"]
    assert kept == [("requests", "north", 50), ("requests", "south", 50)]
    assert ask(database, settings, "north", tenant="free") == {"free": {}}, "a tenant without limits has no shares"


def test_regions_that_ask_at_once_hold_the_limit_at_most(database: Database, settings: Settings) -> None:
    with database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=90))
    regions = [f"r{number}" for number in range(4)]
    start = threading.Barrier(len(regions))

    def ask_often(region: str) -> None:
        start.wait()
        for _ in range(5):
            ask(database, settings, region)

    threads = [threading.Thread(target=ask_often, args=(region,)) for region in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.transaction() as session:
        rows = shares_of(session, "acme")
    assert sum(row.held for row in rows) == 90
    assert {row.version for row in rows} == {5}
