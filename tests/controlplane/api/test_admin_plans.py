"""Plans and pins over the API: the life of a plan, who may move it, and what a refusal says."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.api.admin import pins, plans
from controlplane.errors import UnavailableError
from controlplane.planner.plan import hour_nearest
from controlplane.store.fleet import fleet_index
from controlplane.store.keys import list_audit
from controlplane.store.plans import add_plan
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import a_plan

NEVER = "plan_0"


@pytest.fixture(autouse=True)
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Loops that were asked for; no worker runs here."""
    asked: list[str] = []
    for module in (plans, pins):
        monkeypatch.setattr(module, "enqueue", lambda task, **_: asked.append(task) or True)
    return asked


def waiting(database: Database, count: int, **changes: Any) -> str:
    """A plan of the schedule, for an hour that is not over before the test is, that waits for an operator."""
    hour_s = int(datetime.now(UTC).timestamp() + 600) // 3600 * 3600 + 3600 * len(changes.pop("later", ()))
    why = {"reason": "optimal", "approval_reason": "moves 9 GPUs, the limit is 8"}
    values = {"origin": "schedule", "window_start_s": hour_s, **why, **changes}
    with database.transaction() as session:
        plan, [entry] = a_plan(fleet_index(session), [("llama", "us-east", count)], **values)
        entry.constraint, entry.cost_if_not = "home", 12.5
        plan_id = plan.id
        assert add_plan(session, plan, [entry])
    return plan_id


@pytest.mark.parametrize("dry_run", [True, False])
def test_forecasts_of_the_future_are_no_basis_for_a_plan(ask: Ask, fleet: None, dry_run: bool) -> None:
    later_s = int(datetime.now(UTC).timestamp()) + 3600
    refused = ask("POST", "/admin/plans", json={"dry_run": dry_run, "origin_s": later_s}, status=400)
    assert "in the future" in refused["detail"]


def test_forecasts_are_asked_for_after_the_commit(
    ask: Ask, fleet: None, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may begin at once, and what it does is in the audit already."""
    seen: list[list[str]] = []

    def enqueue(task: str, **_: object) -> bool:
        with database.transaction() as session:
            seen.append([event.action for event in list_audit(session, after=None, limit=1).rows])
        return True

    monkeypatch.setattr(plans, "enqueue", enqueue)
    assert ask("POST", "/admin/forecasts/run", role="admin", json={}, status=202).keys() == {"origin_s"}
    assert seen == [["forecast.run"]]


def test_no_forecasts_are_asked_for_while_the_task_queue_is_away(
    ask: Ask, fleet: None, database: Database, enqueued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: LiveStore) -> None:
        raise UnavailableError("Redis does not answer")

    monkeypatch.setattr(LiveStore, "ping", away)
    refused = ask("POST", "/admin/forecasts/run", role="admin", json={}, status=503)
    assert refused["detail"] == "Redis does not answer"
    assert enqueued == []
    with database.transaction() as session:
        assert "forecast.run" not in [event.action for event in list_audit(session, after=None, limit=10).rows]


def test_a_dry_run_shows_and_writes_nothing(ask: Ask, fleet: None) -> None:
    dry = ask("POST", "/admin/plans", json={"dry_run": True})
    assert dry["index"] == dry["plan"]["fleet_index"]
    assert (dry["pools"], dry["layouts"]) == ([], [])
    assert ask("GET", "/admin/plans")["data"] == []
    draft = ask("POST", "/admin/plans", json={})
    inputs = ask("GET", f"/admin/plans/{draft['plan']['id']}/inputs", role="viewer")
    assert set(inputs) == {"problem", "forecasts", "pools", "corrections", "latencies", "layouts"}
    assert inputs["forecasts"]["series"] == []
    told = ask("GET", f"/admin/plans/{draft['plan']['id']}/explanation", role="viewer")["text"]
    assert "no endpoint had interactive demand" in told
    ask("PUT", "/admin/regions/eu")
    refused = ask("POST", f"/admin/plans/{draft['plan']['id']}/apply", json={"index": draft["index"]}, status=409)
    assert refused["code"] == "stale_index"


@pytest.mark.usefixtures("an_hour_ahead", "fleet")
def test_a_plan_is_of_the_hour_of_the_database(ask: Ask) -> None:
    began_s = datetime.now(UTC).timestamp()
    dry = ask("POST", "/admin/plans", json={"dry_run": True})
    assert dry["plan"]["window_start_s"] in {hour_nearest(began_s), hour_nearest(datetime.now(UTC).timestamp())}


def test_a_plan_that_waits_is_approved_once(ask: Ask, fleet: None, database: Database, enqueued: list[str]) -> None:
    plan_id = waiting(database, 2)
    status = ask("GET", "/admin/status", role="viewer")
    assert status["plan"] is None
    assert (status["planning"]["id"], status["planning"]["approval_reason"]) == (
        plan_id,
        "moves 9 GPUs, the limit is 8",
    )
    for _ in range(2):
        approved = ask("POST", f"/admin/plans/{plan_id}/approve")["plan"]
        assert (approved["state"], approved["approved_by"]) == ("applied", "operator")
    assert enqueued == ["scale", "scale"]
    in_force = ask("GET", "/admin/status")["plan"]
    assert (in_force["id"], in_force["cost_per_hour"]) == (plan_id, 2 * 2.5)
    shown = ask("GET", f"/admin/plans/{plan_id}")
    assert shown["entries"][0]["constraint"] == "home"
    assert shown["entries"][0]["cost_if_not"] == 12.5
    event = ask("GET", "/admin/audit", params={"limit": 1})["data"][0]
    assert (event["action"], event["subject"]) == ("plan.approve", plan_id)


def test_an_approval_that_cannot_be(ask: Ask, fleet: None, database: Database) -> None:
    ask("POST", f"/admin/plans/{NEVER}/approve", status=404)
    plan_id = waiting(database, 2)
    ask("PUT", "/admin/regions/eu")
    assert ask("POST", f"/admin/plans/{plan_id}/approve", status=409)["code"] == "stale_index"
    over = waiting(database, 2, window_start_s=3600)
    assert "is over" in ask("POST", f"/admin/plans/{over}/approve", status=409)["detail"]


def test_a_plan_that_waits_is_rejected(ask: Ask, fleet: None, database: Database) -> None:
    plan_id = waiting(database, 2)
    rejected = ask("POST", f"/admin/plans/{plan_id}/reject", json={"note": "a load test"})["plan"]
    assert (rejected["state"], rejected["reason"]) == ("rejected", "optimal; rejected by operator: a load test")
    assert "is rejected" in ask("POST", f"/admin/plans/{plan_id}/approve", status=409)["detail"]
    ask("POST", f"/admin/plans/{plan_id}/reject", json={"note": "x" * 501}, status=400)


def test_a_rollback_and_its_refusals(ask: Ask, fleet: None, database: Database, enqueued: list[str]) -> None:
    first = waiting(database, 3)
    ask("POST", f"/admin/plans/{first}/approve")
    assert "nothing was in force before" in ask("POST", f"/admin/plans/{first}/rollback", json={}, status=409)["detail"]
    second = waiting(database, 1, later="x")
    ask("POST", f"/admin/plans/{second}/approve")
    assert f"'{second}' is" in ask("POST", f"/admin/plans/{first}/rollback", json={}, status=409)["detail"]
    once = {"headers": {"Idempotency-Key": "back"}, "json": {"note": "too few"}}
    restored = ask("POST", f"/admin/plans/{second}/rollback", **once)
    assert ask("POST", f"/admin/plans/{second}/rollback", **once) == restored
    assert (restored["entries"][0]["before"], restored["entries"][0]["after"]) == (1, 3)
    assert restored["plan"]["previous_plan_id"] == second
    assert ask("GET", f"/admin/plans/{second}")["plan"]["state"] == "rolled_back"
    assert "has no inputs" in ask("GET", f"/admin/plans/{restored['plan']['id']}/inputs", status=404)["detail"]
    assert enqueued == ["scale"] * 3


@pytest.mark.parametrize("act", ["approve", "reject", "rollback", "apply"])
def test_viewers_only_look(ask: Ask, fleet: None, database: Database, act: str) -> None:
    plan_id = waiting(database, 2)
    ask("POST", f"/admin/plans/{plan_id}/{act}", role="viewer", json={"index": 0}, status=403)
    ask("POST", "/admin/pins", role="viewer", json={}, status=403)
    assert ask("GET", f"/admin/plans/{plan_id}", role="viewer")["plan"]["state"] == "draft"


def pin_of(**changes: Any) -> dict[str, Any]:
    until = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    return {"model": "llama", "region": "us-east", "instances": 4, "until": until, "note": "launch"} | changes


def test_a_pin_is_made_listed_and_removed(ask: Ask, fleet: None, enqueued: list[str]) -> None:
    index = ask("GET", "/admin/status")["fleet_index"]
    made = ask("POST", "/admin/pins", json=pin_of(), status=201)
    assert (made["instances"], made["created_by"], made["removed_at"]) == (4, "operator", None)
    assert ask("GET", "/admin/status")["fleet_index"] == index + 1
    assert "pinned to 4 instances" in ask("POST", "/admin/pins", json=pin_of(), status=409)["detail"]
    assert [pin["id"] for pin in ask("GET", "/admin/pins", role="viewer")["data"]] == [made["id"]]
    for _ in range(2):
        assert ask("DELETE", f"/admin/pins/{made['id']}")["removed_at"] is not None
    assert ask("GET", "/admin/pins")["data"] == []
    assert ask("GET", "/admin/pins", params={"live_only": False})["data"][0]["id"] == made["id"]
    assert ask("GET", f"/admin/pins/{made['id']}")["note"] == "launch"
    assert enqueued == ["scale", "scale"]
    actions = [event["action"] for event in ask("GET", "/admin/audit")["data"]]
    assert actions[:2] == ["pin.remove", "pin.create"]


@pytest.mark.parametrize(
    ("changes", "param", "status"),
    [
        ({"until": "2020-01-01T00:00:00Z"}, "until", 400),
        ({"until": "2099-01-01T00:00:00Z"}, "until", 400),
        ({"until": "2026-11-27T18:00"}, "until", 400),  # no zone
        ({"until": None}, "until", 400),
        ({"instances": -1}, "instances", 400),
        ({"instances": 1.5}, "instances", 400),
        ({"model": "Qwen/Qwen3-8B"}, "model", 404),  # not offered there
        ({"region": "mars"}, "model", 404),
        ({"forever": True}, "forever", 400),
    ],
)
def test_a_pin_that_cannot_be(ask: Ask, fleet: None, changes: dict[str, Any], param: str, status: int) -> None:
    refused = ask("POST", "/admin/pins", json=pin_of(**changes), status=status)
    assert refused["param"] == param
    assert ask("GET", "/admin/pins")["data"] == []
    ask("DELETE", "/admin/pins/pin_0", status=404)
