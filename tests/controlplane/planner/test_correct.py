"""What instances do corrects their profiles, and so the plans; until an operator says otherwise."""

import json
from typing import Any

import pytest

from controlplane.planner.correct import correct, correction_settings, first_of, observe
from controlplane.planner.draft import DraftOf
from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import draft_plan, write_draft
from controlplane.planner.snapshot import read_to_plan, read_to_scale
from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.placement.document import parse
from controlplane.policies.profile_correction import CorrectionSettings, LoadSums, LoadWindow
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.plans import get_plan, inputs_of
from controlplane.store.profile_corrections import (
    corrections,
    forget_windows,
    observe_loads,
    read_windows,
    reset_correction,
)
from controlplane.store.tables import Instance, Profile
from tests.controlplane.planner.pool_fleet import LATENCY
from tests.controlplane.world import MODEL, World

NOW_S = 1_000_000_800
HOUR_S = 3600
AT = EndpointGpu(model=MODEL, region="us-east", gpu_type="H800")
URL = "http://127.0.0.1:9"


def windows(world: World) -> dict[ModelGpu, list[LoadWindow]]:
    with world.database.transaction() as session:
        return dict(read_windows(session, since_s=0))


def rate_in(world: World, settings: Settings) -> float:
    """Theta as plans count it."""
    with world.database.transaction() as session:
        snapshot = read_to_plan(session, settings, now_s=NOW_S, window_start_s=NOW_S)
    return snapshot.profiles[AT.pair].tokens_per_s


def six_hours(world: World, theta: float = 600.0) -> None:
    """Windows by Little's law of an instance that is at 70 % of its memory at `theta`; the profile says 1,000."""
    slope = (0.7 / theta - 2e-4) / 0.7
    with world.database.transaction() as session:
        for number in range(72):
            rate = theta * (0.4 + 0.6 * (number % 6) / 5)
            sums = LoadSums(instances=2, tokens_per_s=2 * rate, utilization=2 * 2e-4 * rate / (1 - slope * rate))
            observe_loads(session, {AT: sums}, minute_s=NOW_S - 300 * (number + 1))


def test_a_minute_is_observed_once_and_only_where_an_instance_serves_alone(world: World, settings: Settings) -> None:
    first = world.serve("n1", URL)
    world.report("n1", first, region="us-east", url=URL, used=0.25, rate=400.0)
    other = world.serve("n2", URL, region="us-west")
    world.report("n2", other, region="us-west", url=URL, used=0.5, rate=600.0)
    silent = world.serve("n3", URL)
    with world.database.transaction() as session:
        for name in (first, silent):
            session.get_one(Instance, name).observed = InstanceState.READY
    for second in (0, 5, 60):
        with world.database.transaction() as session:
            assert observe(session, world.live, settings, now_s=NOW_S + second) == 1, "us-west is not ready yet"
    start_s = NOW_S // 300 * 300
    seen = LoadWindow(start_s=start_s, tokens_per_s=400.0, utilization=0.25, late=0.0)
    assert windows(world) == {AT.pair: [seen]}
    with world.database.transaction() as session:
        assert forget_windows(session, before_s=start_s, count_max=10) == 0
        assert forget_windows(session, before_s=start_s + 1, count_max=10) == 1


def test_plans_and_scaling_count_with_what_was_observed(world: World, settings: Settings) -> None:
    six_hours(world)
    [reason] = correct(world.database, world.live, settings, now_s=NOW_S).values()
    assert reason == "1,000 -> 850 tokens/s, a step towards 600: 72 windows in 6 hours reach 70% of KV memory there"
    assert rate_in(world, settings) == pytest.approx(850)
    scaled = read_to_scale(world.database, world.live, settings, now_s=NOW_S).snapshot
    assert scaled.profiles[AT.pair].tokens_per_s == pytest.approx(850)
    assert correct(world.database, world.live, settings, now_s=NOW_S + 60) == {}, "once an hour"
    for hour in range(1, 4):
        correct(world.database, world.live, settings, now_s=NOW_S + hour * HOUR_S)
    assert rate_in(world, settings) == pytest.approx(600, rel=0.05)


def test_a_plan_says_what_it_counted_with(world: World, settings: Settings) -> None:
    world.join("n1")
    six_hours(world)
    correct(world.database, world.live, settings, now_s=NOW_S)
    of = DraftOf(window_start_s=NOW_S // HOUR_S * HOUR_S + HOUR_S, origin="operator", created_by="me")
    plan_id = write_draft(world.database, draft_plan(world.database, settings, of, now_s=NOW_S), now_s=NOW_S)
    assert plan_id is not None
    with world.database.transaction() as session:
        inputs: Any = inputs_of(session, plan_id)
        words = explanation_of(session, plan_id)
        assert (
            "profiles corrected by what instances do: tide on H800 to 850 tokens/s" in get_plan(session, plan_id).reason
        )
    [corrected] = inputs["corrections"]
    assert (corrected["stated_tokens_per_s"], corrected["tokens_per_s"]) == (1000, pytest.approx(850))
    facts, _ = parse(json.dumps(inputs["problem"]))
    assert facts.profiles[AT.pair].tokens_per_s == pytest.approx(850)
    assert "tide on H800: 850 instead of 1,000 tokens/s; 1,000 -> 850 tokens/s, a step towards 600" in words


def test_an_operator_switches_it_off_resets_it_and_states_something_else(world: World, settings: Settings) -> None:
    six_hours(world)
    off = settings.model_copy(update={"profile_correction": False})
    assert correct(world.database, world.live, off, now_s=NOW_S) == {}
    correct(world.database, world.live, settings, now_s=NOW_S)
    assert (rate_in(world, off), rate_in(world, settings)) == (1000, pytest.approx(850))
    stated = Profile(model=MODEL, gpu_type="H800", tokens_per_s=900.0, gpus=1, load_time_s=30.0)
    with world.database.transaction() as session:
        fleet.put_profile(session, stated)
    assert rate_in(world, settings) == 900, "the correction was of another statement"
    correct(world.database, world.live, settings, now_s=NOW_S + 60)
    assert rate_in(world, settings) == pytest.approx(765)
    with world.database.transaction() as session:
        assert reset_correction(session, AT.pair).factor == pytest.approx(0.85)
        assert corrections(session) == {}
    assert windows(world) == {}
    assert correct(world.database, world.live, settings, now_s=NOW_S + HOUR_S) == {}
    assert rate_in(world, settings) == 900


def test_step_times_that_nodes_report_correct_those_that_pools_are_planned_with(
    world: World, settings: Settings
) -> None:
    stated = Profile(model=MODEL, gpu_type="H800", tokens_per_s=1000.0, gpus=1, load_time_s=30.0, latency=LATENCY)
    with world.database.transaction() as session:
        fleet.put_profile(session, stated)
    instance_id = world.serve("n1", URL)
    prefill_s = 5.7e-3 + 1024 * 2.3e-5 + 1024**2 * 2.1e-10
    world.report("n1", instance_id, region="us-east", url=URL, prefill_s=1.1 * prefill_s)
    assert correct(world.database, world.live, settings, now_s=NOW_S) == {}
    with world.database.transaction() as session:
        latency = read_to_plan(session, settings, now_s=NOW_S, window_start_s=NOW_S).latencies[AT.pair]
        changed = Profile(model=MODEL, gpu_type="H800", tokens_per_s=1000.0, gpus=1, load_time_s=30.0)
        fleet.put_profile(session, changed)
    assert latency["prefill_base_s"] == pytest.approx(1.1 * LATENCY["prefill_base_s"])
    assert latency["decode_base_s"] == LATENCY["decode_base_s"]
    with world.database.transaction() as session:
        assert corrections(session) == {}, "other step times are stated"


def test_a_profile_that_is_gone_is_not_corrected(world: World, settings: Settings) -> None:
    with world.database.transaction() as session:
        sums = LoadSums(instances=1, tokens_per_s=1.0, utilization=0.5)
        observe_loads(session, {EndpointGpu(model="gone", region="us-east", gpu_type="H800"): sums}, minute_s=NOW_S)
    assert correct(world.database, world.live, settings, now_s=NOW_S + 60) == {}


def test_the_policy_has_the_defaults_of_the_service(settings: Settings) -> None:
    assert correction_settings(settings) == CorrectionSettings()


def test_a_reason_names_the_first_of_many() -> None:
    assert [first_of("abcde"[:count]) for count in (1, 3, 5)] == ["a", "a, b, c", "a, b, c and 2 more"]
