"""What-if runs over the API: who may, what is refused and why, and what a run is after each step."""

from typing import Any

import pytest

from controlplane.api.admin import what_if
from controlplane.settings import Settings
from controlplane.store.session import Database
from controlplane.store.what_if import claim_run, complete_run
from tests.controlplane.api.conftest import Ask

pytestmark = pytest.mark.usefixtures("fleet")
PATH = "/admin/what-if"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"what_if_queued_max": 2})


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tasks that were sent."""
    names: list[str] = []
    monkeypatch.setattr(what_if, "enqueue", names.append)
    return names


def create(ask: Ask, status: int = 201, role: str = "operator", **body: Any) -> Any:
    return ask("POST", PATH, role=role, json={"name": "half of us-east"} | body, status=status)


def test_an_operator_starts_and_a_viewer_sees(ask: Ask, sent: list[str], database: Database) -> None:
    create(ask, status=403, role="viewer")
    changes = {"strategy": "lt-u", "capacity": [{"region": "us-east", "gpu_type": "H800", "factor": 0.5}]}
    run = create(ask, hours=6, changes=changes)
    assert sent == ["what_if"]
    assert (run["state"], run["progress"], run["hours"], run["created_by"]) == ("queued", 0, 6, "operator")
    assert run["changes"]["capacity"] == changes["capacity"]
    assert ask("GET", PATH, role="viewer")["data"] == [run]
    assert ask("GET", PATH, role="viewer", params={"state": "running"})["data"] == []
    with database.transaction() as session:
        assert claim_run(session, running_max=1) is not None
        complete_run(session, run["id"], {"requests": 5}, "abc")
    whole = ask("GET", f"{PATH}/{run['id']}", role="viewer")
    assert (whole["state"], whole["progress"], whole["event_log_hash"]) == ("completed", 1, "abc")
    assert whole["result"] == {"requests": 5}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"hours": 0}, "hours"),
        ({"hours": 169}, "hours"),
        ({"name": ""}, "name"),
        ({"changes": {"strategy": "hope"}}, "changes.strategy"),
        ({"changes": {"capacity": [{"factor": 101.0}]}}, "changes.capacity.0.factor"),
        ({"changes": {"capacity": [{"region": "mars", "factor": 1.0}]}}, "changes.capacity.0.region"),
        ({"changes": {"prices": [{"gpu_type": "abacus", "cost_per_hour": 1.0}]}}, "changes.prices.0.gpu_type"),
        ({"changes": {"demand": [{"model": "nobody", "factor": 2.0}]}}, "changes.demand.0.model"),
        ({"changes": {"lost_regions": [{"region": "us-east", "after_h": 24.0, "down_h": 1.0}]}},
         "changes.lost_regions.0.after_h"),
        ({"changes": {"demand": [{"factor": 1.0}] * 51}}, "changes.demand"),
        ({"changes": {"weather": 1}}, "changes.weather"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(ask: Ask, body: dict[str, Any], field: str) -> None:
    problem = ask("POST", PATH, role="operator", json={"name": "x"} | body, status=400)
    assert field in str(problem), problem


def test_a_plan_must_exist(ask: Ask) -> None:
    create(ask, status=404, changes={"plan_id": "plan_none"})


def test_only_so_many_wait(ask: Ask) -> None:
    first, _ = create(ask), create(ask)
    assert "what_if_queued_max" in str(create(ask, status=429))
    ask("POST", f"{PATH}/{first['id']}/cancel", role="operator")
    create(ask)


def test_a_run_is_cancelled_before_it_is_deleted(ask: Ask) -> None:
    run = create(ask)
    place = f"{PATH}/{run['id']}"
    ask("DELETE", place, role="operator", status=409)
    for _ in range(2):
        assert ask("POST", f"{place}/cancel", role="operator")["state"] == "cancelled"
    ask("POST", f"{place}/cancel", role="viewer", status=403)
    ask("DELETE", place, role="operator")
    ask("GET", place, role="viewer", status=404)
