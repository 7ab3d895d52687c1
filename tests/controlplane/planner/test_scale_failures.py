"""Scaling where instances do not come up: in time, or at all."""

import time

import pytest
from sqlalchemy import select, text

from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.instances import desired_of, observe
from controlplane.store.tables import Instance
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.planner.test_scale import endpoint, follow, node, run, wanted
from tests.controlplane.planner.test_scale_spot import heartbeat, held
from tests.controlplane.world import MODEL, World


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


@pytest.mark.parametrize(
    ("state", "error", "patience_s"),
    [
        (InstanceState.LOADING, None, 900),
        (InstanceState.FAILED, "no such file", 10),
        (InstanceState.LOADING, "no such file", 10),  # it failed and is tried again
    ],
)
def test_what_does_not_come_up_is_replaced_beside_and_then_let_go(
    world: World, settings: Settings, state: InstanceState, error: str | None, patience_s: int
) -> None:
    node(world)
    follow(world, 2)
    run(world, settings)
    heartbeat(world, used=0.5)
    with world.database.transaction() as session:
        late = session.scalars(select(Instance).order_by(Instance.id)).first()
        assert late is not None
        late.observed, late.error, late_id = state, error, late.id
        session.flush()
        session.execute(text(f"UPDATE instances SET changed_at = to_timestamp(100) WHERE id = '{late_id}'"))
    assert run(world, settings, now_s=100.0 + patience_s).changes() == {}
    assert run(world, settings, now_s=101.0 + patience_s).changes() == {"started": 1}
    with world.database.transaction() as session:
        session.execute(text(f"UPDATE instances SET observed = 'ready' WHERE id <> '{late_id}'"))
    assert run(world, settings, now_s=102.0 + patience_s).changes() == {"drained": 1}
    assert [each.instance_id for each in held(world) if each.draining] == [late_id]


def test_a_model_that_loads_slowly_has_more_time(world: World, settings: Settings) -> None:
    node(world)
    with world.database.transaction() as session:
        session.execute(text("UPDATE profiles SET load_time_s = 600"))
    follow(world, 1)
    run(world, settings)
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET observed = 'loading', changed_at = to_timestamp(100)"))
    assert run(world, settings, now_s=100.0 + 2 * 7200).changes() == {}, "from another region it takes two hours"
    assert run(world, settings, now_s=101.0 + 2 * 7200).changes() == {"started": 1}


def failing(world: World, state: str) -> None:
    """No load on the node succeeds: now it failed, or it is tried again."""
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
        error = "no such file" if state == "failed" else None
        reports = tuple(
            InstanceReport(instance_id=each.instance_id, model=MODEL, slot=each.slot, state=state, error=error)  # type: ignore[arg-type]
            for each in desired.instances
            if not each.draining
        )
        observe(session, Heartbeat(node="n1", boot_id="b", generation=desired.generation, instances=reports))


@pytest.mark.parametrize("planned", [True, False])
def test_a_model_that_never_loads_is_not_started_over_and_over(
    world: World, settings: Settings, *, planned: bool
) -> None:
    impatient = settings.model_copy(update={"scale_failed_patience_s": 0.0})
    node(world)
    if planned:
        follow(world, 1)
    else:
        endpoint(world, 1, 4)
    for turn in range(12):
        now_s = time.time() + 15 * turn
        run(world, impatient, now_s=now_s)
        failing(world, "loading")
        failing(world, "failed" if turn % 2 else "loading")
        if turn == 0:
            failing(world, "failed")
    assert wanted(world) == {"running": 2}, "it and its replacement"
    with world.database.transaction() as session:
        assert set(session.scalars(select(Instance.error))) == {"no such file"}
