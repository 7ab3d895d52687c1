"""Regrouping by an operator's word or a plan's: instances go elsewhere first, then their slots become others."""

import pytest
from sqlalchemy import select, text

from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import plan_hour
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import desired_of, present_layout
from controlplane.store.layouts import release_layout
from controlplane.store.plans import Plan, get_plan, inputs_of, roll_back
from controlplane.store.tables import Desired, Instance, Node, Profile
from tests.controlplane.planner.pool_fleet import add_models, expect
from tests.controlplane.planner.test_evacuation import beat
from tests.controlplane.planner.test_scale import endpoint, run
from tests.controlplane.store.test_layouts import join, want
from tests.controlplane.world import World


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0, "spot_enabled": False})


def slots(world: World) -> list[tuple[int, str]]:
    """Slots of the live instances of n1, and what is wanted of these."""
    with world.database.transaction() as session:
        live = select(Instance.slot, Instance.desired).where(Instance.desired != Desired.STOPPED)
        return [(slot, desired) for slot, desired in session.execute(live.order_by(Instance.slot))]


def layout(world: World) -> tuple[int, ...]:
    with world.database.transaction() as session:
        assert desired_of(session, "n1").layout == present_layout(session, "n1")
        return present_layout(session, "n1")


def begin(world: World, settings: Settings, *sizes: int, instances: int) -> None:
    join(world, sizes, gpu_bytes=80 << 30)
    beat(world, "n1")
    endpoint(world, instances, 4)
    run(world, settings)
    beat(world, "n1")


def test_instances_move_to_other_slots_before_theirs_is_regrouped(world: World, settings: Settings) -> None:
    begin(world, settings, 1, 1, 2, instances=1)
    [(held, _)] = slots(world)
    want(world, *((2, 2) if held < 2 else (1, 1, 1, 1)))
    assert run(world, settings).changes() == {"started": 1}
    (successor,) = (slot for slot, _ in slots(world) if slot != held)
    assert run(world, settings).changes() == {}, "it waits for its successor"
    beat(world, "n1")
    assert run(world, settings).changes() == {"drained": 1}
    assert layout(world) == (1, 1, 2), "it is not empty yet"
    beat(world, "n1")
    beat(world, "n1")
    run(world, settings)
    assert layout(world) == ((2, 2) if held < 2 else (1, 1, 1, 1))
    assert slots(world) == [(successor, "running")]


def test_without_room_elsewhere_it_drains_when_it_has_waited_long_enough(world: World, settings: Settings) -> None:
    begin(world, settings, 4, instances=1)
    want(world, 1, 1, 2)
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET layout_at = to_timestamp(1000)"))
    early = 1000.0 + settings.regroup_patience_s
    assert run(world, settings, now_s=early).changes() == {}
    assert slots(world) == [(0, "running")]
    assert run(world, settings, now_s=early + 1).changes() == {"drained": 1}
    assert slots(world) == [(0, "draining")]
    assert run(world, settings, now_s=early + 2).changes() == {}, "it is not revived on a slot that goes"
    beat(world, "n1")
    beat(world, "n1")
    assert run(world, settings, now_s=early + 3).changes() == {"started": 1}
    assert layout(world) == (1, 1, 2)
    assert [desired for _, desired in slots(world)] == ["running"], "it starts again on a new slot"


HOUR_S = 1_000_000_800


def planned(world: World, settings: Settings, hour_s: int, tokens_per_s: dict[str, float]) -> Plan:
    """The plan of an hour, for these forecasts; its node was heard of just now."""
    beat(world, "n1")
    expect(world, tokens_per_s, origin_s=hour_s - 600)
    made = plan_hour(world.database, settings.model_copy(update={"plan_layouts": True}), now_s=hour_s - 120)
    assert made is not None
    with world.database.transaction() as session:
        return get_plan(session, made)


def two_sizes(world: World) -> None:
    """A model of one GPU and one of four, and a node of eight slots of one."""
    add_models(world, "ebb", "spring", latency=None)
    with world.database.transaction() as session:
        four = Profile(model="spring", gpu_type="H800", tokens_per_s=1000.0, gpus=4, load_time_s=30.0)
        fleet.put_profile(session, four)
    join(world, (1,) * 8)


def test_a_plan_regroups_and_says_so(world: World, settings: Settings) -> None:
    two_sizes(world)
    plan = planned(world, settings, HOUR_S, {"ebb": 500.0, "spring": 900.0})
    [one] = plan.layouts
    assert (one["node"], one["before"], one["after"]) == ("n1", [1] * 8, [4, 1, 1, 1, 1])
    with world.database.transaction() as session:
        assert session.get_one(Node, "n1").layout == [4, 1, 1, 1, 1]
        assert "n1 (H800 in us-east): 1,1,1,1,1,1,1,1 -> 4,1,1,1,1; lacking" in explanation_of(session, plan.id)
        inputs = inputs_of(session, plan.id)
    assert inputs is not None
    [place] = inputs["layouts"]["places"]
    assert [(size["gpus"], size["taken_gpus"], size["missing_slots"]) for size in place["slots_of"]] == [
        (1, 1.0, 0),
        (4, 4.0, 0),
    ]


def test_an_operators_word_wins_over_a_plan(world: World, settings: Settings) -> None:
    two_sizes(world)
    want(world, *(1,) * 8)
    plan = planned(world, settings, HOUR_S, {"ebb": 500.0, "spring": 900.0})
    assert plan.layouts == []
    with world.database.transaction() as session:
        assert session.get_one(Node, "n1").layout is None
        assert "spring takes 4 GPUs together, the largest slot of H800 in us-east has 1" in str(plan.unserved)


def test_a_rollback_takes_the_layouts_back(world: World, settings: Settings) -> None:
    two_sizes(world)
    planned(world, settings, HOUR_S, {"ebb": 500.0})
    plan = planned(world, settings, HOUR_S + 3600, {"ebb": 500.0, "spring": 900.0})
    with world.database.transaction() as session:
        restored = roll_back(session, plan.id, window_start_s=HOUR_S + 3600, by="ann", note="")
        [back] = restored.layouts
        assert (back["before"], back["after"]) == ([4, 1, 1, 1, 1], [1] * 8)
        assert back["reason"] == f"as before plan {plan.id}"
        assert session.get_one(Node, "n1").layout is None, "it has not begun"


@pytest.mark.parametrize("released", [True, False])
def test_a_rollback_leaves_what_an_operator_chose_since(world: World, settings: Settings, released: bool) -> None:
    two_sizes(world)
    planned(world, settings, HOUR_S, {"ebb": 500.0})
    plan = planned(world, settings, HOUR_S + 3600, {"ebb": 500.0, "spring": 900.0})
    want(world, 4, 4)
    with world.database.transaction() as session:
        if released:
            release_layout(session, "n1")
        assert roll_back(session, plan.id, window_start_s=HOUR_S + 3600, by="ann", note="").layouts == []
        assert session.get_one(Node, "n1").layout == [4, 4]
