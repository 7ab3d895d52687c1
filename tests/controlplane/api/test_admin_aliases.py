"""`/admin/aliases` and `/admin/rollouts`: who may change them, what is refused, and what the audit says."""

from typing import Any

import pytest
from sqlalchemy import select

from controlplane.settings import Settings
from controlplane.store.keys import AuditEvent
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import World

HALF = {"targets": {"tide": 1, "tide-2": 1}}


@pytest.fixture
def world(database: Database, live: LiveStore, settings: Settings) -> World:
    world = World(database, live, settings)
    world.add_model("tide-2")
    return world


def audited(world: World) -> list[tuple[str, str]]:
    with world.database.transaction() as session:
        rows = session.execute(select(AuditEvent.action, AuditEvent.subject).order_by(AuditEvent.id))
        return [(action, subject) for action, subject in rows if action.startswith(("alias", "rollout"))]


def test_an_alias_is_made_changed_and_deleted(ask: Ask, world: World) -> None:
    made = ask("PUT", "/admin/aliases/team/chat", json={"targets": {"tide": 1}})
    assert made == {"name": "team/chat", "owner": None, "targets": {"tide": 1}, "rollout": None}
    ask("PUT", "/admin/aliases/team/chat", json={"targets": {"tide": 1}})
    ask("PUT", "/admin/aliases/team/chat", json=HALF)
    assert ask("GET", "/admin/aliases/team/chat", role="viewer")["targets"] == HALF["targets"]
    assert [row["name"] for row in ask("GET", "/admin/aliases", role="viewer")["data"]] == ["team/chat"]
    ask("DELETE", "/admin/aliases/team/chat")
    ask("GET", "/admin/aliases/team/chat", status=404)
    assert audited(world) == [("alias.put", "team/chat")] * 2 + [("alias.delete", "team/chat")]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"targets": {}}, "targets"),
        ({"targets": {"tide": -1}}, "targets"),
        ({"targets": {"tide": 0}}, "above 0"),
        ({"targets": {"tide": 1.5}}, "targets"),
        ({"targets": {f"m{number}": 1 for number in range(17)}}, "16"),
        ({"targets": {"tide": 1}, "weights": {}}, "weights"),
    ],
)
def test_a_bad_alias_names_its_field(ask: Ask, world: World, body: dict[str, Any], words: str) -> None:
    problem = ask("PUT", "/admin/aliases/chat", status=400, json=body)
    assert words in str(problem)


def test_a_roll_out_is_begun_steered_and_ended(ask: Ask, world: World) -> None:
    body = {"alias": "tide", "model": "tide-2", "steps": [10, 100], "hold_s": 5.0}
    begun = ask("POST", "/admin/rollouts", status=201, json=body)
    assert (begun["state"], begun["step"], begun["before"]) == ("in_progress", -1, {"tide": 1})
    path = f"/admin/rollouts/{begun['id']}"
    assert ask("GET", "/admin/aliases/tide")["rollout"] == begun["id"]
    assert "roll it back" in ask("PUT", "/admin/aliases/tide", status=409, json=HALF)["detail"]
    ask("DELETE", "/admin/aliases/tide", status=409)
    ask("POST", "/admin/rollouts", status=409, json=body)
    assert ask("POST", f"{path}/pause")["state"] == "paused"
    ask("POST", f"{path}/pause", status=409)
    assert ask("POST", f"{path}/resume")["state"] == "in_progress"
    ask("POST", f"{path}/promote")
    assert ask("POST", f"{path}/rollback")["reason"].startswith("rolled back by ")
    ask("POST", f"{path}/rollback", status=409)
    assert ask("GET", "/admin/aliases/tide")["targets"] == {"tide": 1}
    assert [row["id"] for row in ask("GET", "/admin/rollouts", role="viewer")["data"]] == [begun["id"]]
    assert ask("GET", "/admin/rollouts", params={"live_only": True})["data"] == []
    assert ask("GET", "/admin/rollouts", params={"alias": "chat"})["data"] == []
    done = ["create", "pause", "resume", "promote", "rollback"]
    assert audited(world) == [(f"rollout.{what}", begun["id"]) for what in done]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [50, 50]}, "must rise"),
        ({"steps": [0, 100]}, "steps"),
        ({"steps": [50, 101]}, "steps"),
        ({"hold_s": -1.0}, "hold_s"),
        ({"worse_max": 2.0}, "worse_max"),
    ],
)
def test_a_bad_roll_out_names_its_field(ask: Ask, world: World, changes: dict[str, Any], words: str) -> None:
    body = {"alias": "tide", "model": "tide-2"} | changes
    assert words in str(ask("POST", "/admin/rollouts", status=400, json=body))


def test_who_looks_may_not_change(ask: Ask, world: World) -> None:
    ask("PUT", "/admin/aliases/chat", role="viewer", status=403, json=HALF)
    ask("POST", "/admin/rollouts", role="viewer", status=403, json={"alias": "tide", "model": "tide-2"})
