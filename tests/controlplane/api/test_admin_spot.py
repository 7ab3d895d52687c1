"""`/admin/spot`: who sees it, who may lease, what is refused, and what the audit says."""

from typing import Any

import pytest
from sqlalchemy import text

from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.instances import desired_of
from controlplane.store.leases import give_notice
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Instance
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import MODEL, World

ABSENT = "/admin/spot/inst_none/lease"
HOUR = {"holder": "lab", "duration_s": 3600}


@pytest.fixture
def world(database: Database, live: LiveStore, settings: Settings) -> World:
    world = World(database, live, settings)
    world.join("n1")
    return world


def place(world: World, count: int = 1) -> list[str]:
    """Spot instances, loaded."""
    ids = [world.place("n1", desired=Desired.SPOT) for _ in range(count)]
    with world.database.transaction() as session:
        for instance_id in ids:
            session.get_one(Instance, instance_id).observed = InstanceState.SPOT
    return ids


def told(world: World) -> tuple[int, list[str | None]]:
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
    return desired.generation, [each.lease_id for each in desired.instances]


def test_the_list_shows_what_is_lent_out_and_to_whom(ask: Ask, world: World) -> None:
    world.place("n1")
    first, second = place(world, 2)
    lease = ask("POST", f"/admin/spot/{second}/lease", status=201, json=HOUR)
    page = ask("GET", "/admin/spot", role="viewer")
    assert [row["instance_id"] for row in page["data"]] == [first, second]
    shown = page["data"][0]
    expected = {"model": MODEL, "region": "us-east", "gpu_type": "H800", "node": "n1", "slot": 0, "ready": True}
    assert {name: shown[name] for name in expected} == expected
    assert shown["spot_at"]
    assert [row["lease"] for row in page["data"]] == [None, lease]
    part = ask("GET", "/admin/spot", params={"limit": 1})
    assert part["has_more"]
    rest = ask("GET", "/admin/spot", params={"after": part["next"]})
    assert [row["instance_id"] for row in rest["data"]] == [second]


def test_a_lease_and_its_return(ask: Ask, world: World) -> None:
    (held,) = place(world)
    lease = ask("POST", f"/admin/spot/{held}/lease", status=201, json=HOUR)
    assert (lease["holder"], lease["created_by"], lease["ended_at"]) == ("lab", "operator", None)
    assert told(world) == (1, [lease["id"]]), "the node lets its requests in"
    again = ask("POST", f"/admin/spot/{held}/lease", status=409, json=HOUR | {"holder": "other"})
    assert again["detail"].startswith(f"instance '{held}' is leased by 'lab' until 20")
    back = ask("DELETE", f"/admin/spot/{held}/lease")
    assert (back["id"], back["end_reason"]) == (lease["id"], "returned")
    assert told(world) == (2, [None])
    assert ask("DELETE", f"/admin/spot/{held}/lease", status=404)["detail"] == f"nobody leases instance '{held}'"
    events = ask("GET", "/admin/audit", params={"limit": 2})["data"]
    assert [(event["action"], event["subject"]) for event in events] == [("spot.return", held), ("spot.lease", held)]
    assert events[0]["after"]["end_reason"] == "returned"


def test_a_repeated_request_leases_once(ask: Ask, world: World) -> None:
    (held,) = place(world)
    key = {"Idempotency-Key": "once"}
    first = ask("POST", f"/admin/spot/{held}/lease", status=201, json=HOUR, headers=key)
    assert ask("POST", f"/admin/spot/{held}/lease", status=201, json=HOUR, headers=key) == first


def test_what_is_not_spot_any_more_is_a_conflict(ask: Ask, world: World) -> None:
    running = world.place("n1")
    assert "is running, not spot" in ask("POST", f"/admin/spot/{running}/lease", status=409, json=HOUR)["detail"]
    ask("POST", ABSENT, status=404, json=HOUR)
    ask("DELETE", ABSENT, status=404)


def test_notice_is_shown(ask: Ask, world: World) -> None:
    (held,) = place(world)
    ask("POST", f"/admin/spot/{held}/lease", status=201, json=HOUR)
    with world.database.transaction() as session:
        give_notice(session, [held], notice_s=30)
    shown = ask("GET", "/admin/spot")["data"][0]["lease"]
    assert shown["reclaim_at"] < shown["expires_at"]
    assert ask("DELETE", f"/admin/spot/{held}/lease")["end_reason"] == "returned"
    assert "being taken back" in ask("POST", f"/admin/spot/{held}/lease", status=409, json=HOUR)["detail"]
    with world.database.transaction() as session:
        session.execute(text("UPDATE spot_leases SET ended_at = ended_at - interval '61 s'"))
    ask("POST", f"/admin/spot/{held}/lease", status=201, json=HOUR)


@pytest.mark.parametrize(
    ("body", "param", "detail"),
    [
        ({"holder": "lab", "duration_s": 59}, "duration_s", "must be from 60 to 86400, got 59"),
        ({"holder": "lab", "duration_s": 86_401}, "duration_s", "must be from 60 to 86400"),
        ({"holder": "lab", "duration_s": "60"}, "duration_s", ""),
        ({"holder": "lab"}, "duration_s", ""),
        ({"holder": "No Name", "duration_s": 60}, "holder", ""),
        ({"holder": "lab", "duration_s": 60, "for": "x"}, "for", ""),
    ],
)
def test_bad_leases_are_refused(ask: Ask, world: World, body: dict[str, Any], param: str, detail: str) -> None:
    (held,) = place(world)
    refused = ask("POST", f"/admin/spot/{held}/lease", status=400, json=body)
    assert refused["param"] == param
    assert detail in refused["detail"]


def test_roles(ask: Ask, world: World) -> None:
    for role, status in (("viewer", 403), ("client", 403), ("node", 403), ("admin", 404)):
        ask("POST", ABSENT, role=role, status=status, json=HOUR)
        ask("DELETE", ABSENT, role=role, status=status)
    ask("GET", "/admin/spot", role="client", status=403)
