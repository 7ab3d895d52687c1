"""The latency that requests had is compared with their profiles', and the next plan says where they differ."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text

from controlplane.planner.compare import compare, differing
from controlplane.planner.draft import DraftOf
from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import draft_plan, write_draft
from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.latency_comparison import LatencyComparison, MeasuredLatency, TierLatency, predict_latency
from controlplane.policies.profile_correction import Correction, LoadSums
from controlplane.policies.step_correction import StepCorrection
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.latency_comparisons import (
    LatencyComparisonRow,
    comparisons,
    measure_latency,
    measured_since_s,
    put_comparisons,
)
from controlplane.store.plans import get_plan, inputs_of
from controlplane.store.profile_corrections import observe_loads, put_correction, read_loads
from controlplane.store.request_log import RequestRecord, write_requests
from controlplane.store.tables import Instance, Profile, Slot
from tests.controlplane.planner.pool_fleet import LATENCY
from tests.controlplane.world import MODEL, World, until

NOW_S = 1_000_000_800
AT = EndpointGpu(model=MODEL, region="us-east", gpu_type="H800")
URL = "http://127.0.0.1:9"


def a_measurement() -> MeasuredLatency:
    """Of 500 requests."""
    means = {"ttft_s": 0.12, "tbt_s": 0.04, "decode_s": 0.5, "prompt_tokens": 100.0, "context_tokens": 110.0}
    tiers = {"IW-F": TierLatency(requests=500, ttft_p50_s=0.1, ttft_p95_s=0.3)}
    return MeasuredLatency(requests=500, **means, x=100.0, y=1e4, xx=1e4, yy=1e8, xy=1e6, tiers=tiers)


def ended(instance_id: str, **changes: Any) -> RequestRecord:
    """A prompt of 200 tokens with 50 cached ones, and 11 tokens; the node has it after 10 ms, it ends after 310 ms."""
    values: dict[str, Any] = {
        "request_id": "r",
        "ended_at": datetime.fromtimestamp(NOW_S - 60, UTC),
        "endpoint": "/v1/completions",
        "instance_id": instance_id,
        "nodes": ["n1"],
        "tier": "IW-F",
        "outcome": "ok",
        "prompt_tokens": 200,
        "cached_tokens": 50,
        "completion_tokens": 11,
        "placed_s": 0.01,
        "first_token_s": 0.11,
        "duration_s": 0.31,
    }
    return RequestRecord(**(values | changes))


def write(world: World, *records: RequestRecord) -> None:
    with world.database.transaction() as session:
        write_requests(session, records)


def measure(world: World, **asked: Any) -> Mapping[EndpointGpu, MeasuredLatency]:
    with world.database.transaction() as session:
        return measure_latency(session, since_s=NOW_S - 3600, **asked)


def load(world: World, tokens_per_s: float, *, instances: int = 1, age_s: int = 300) -> None:
    """In one minute."""
    with world.database.transaction() as session:
        sums = LoadSums(instances=instances, tokens_per_s=instances * tokens_per_s, utilization=0.2)
        observe_loads(session, {AT: sums}, minute_s=NOW_S - age_s)


def state(world: World, latency: dict[str, Any] | None) -> None:
    profile = Profile(model=MODEL, gpu_type="H800", tokens_per_s=1000.0, gpus=1, load_time_s=30.0, latency=latency)
    with world.database.transaction() as session:
        fleet.put_profile(session, profile)


def rows(world: World) -> list[LatencyComparisonRow]:
    with world.database.transaction() as session:
        return list(session.scalars(comparisons()))


def test_means_are_over_requests_and_tokens(world: World) -> None:
    instance_id = world.serve("n1", URL)
    other = {"tier": "IW-N", "prompt_tokens": 100, "cached_tokens": None, "completion_tokens": 1}
    write(
        world,
        ended(instance_id),
        ended(instance_id, first_token_s=0.21, duration_s=1.21, completion_tokens=41),
        ended(instance_id, first_token_s=0.41, duration_s=0.41, **other),
    )
    [(key, found)] = measure(world).items()
    assert (key, found.requests) == (AT, 3)
    assert found.ttft_s == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert found.tbt_s == pytest.approx((0.2 + 1.0) / (10 + 40)), "over all tokens, not over requests"
    assert found.decode_s == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert found.prompt_tokens == pytest.approx(500 / 3)
    assert found.context_tokens == pytest.approx((10 * 205.5 + 40 * 220.5) / 50)
    assert (found.x, found.y) == (pytest.approx(400 / 3), pytest.approx((2 * (200**2 - 50**2) + 100**2) / 3))
    assert found.xx == pytest.approx((2 * 150**2 + 100**2) / 3)
    assert found.yy == pytest.approx((2 * 37_500**2 + 10_000**2) / 3)
    assert found.xy == pytest.approx((2 * 150 * 37_500 + 100 * 10_000) / 3)
    assert found.tiers == {
        "IW-F": TierLatency(requests=2, ttft_p50_s=pytest.approx(0.15), ttft_p95_s=pytest.approx(0.195)),
        "IW-N": TierLatency(requests=1, ttft_p50_s=pytest.approx(0.4), ttft_p95_s=pytest.approx(0.4)),
    }


def test_requests_whose_times_are_not_of_one_instance_are_left_out(world: World) -> None:
    """Old, failed, moved, deferred or without tokens; of a shared slot, one of two workers, or an unknown instance."""
    instance_id, pooled, split = (world.serve(name, URL) for name in ("n1", "n2", "n3"))
    with world.database.transaction() as session:
        instance = session.get_one(Instance, pooled)
        instance.pooled, instance.gpus = True, 0
        session.get_one(Slot, ("n3", 0)).workers = 2
    write(
        world,
        ended(instance_id, ended_at=datetime.fromtimestamp(NOW_S - 3601, UTC)),
        ended(instance_id, outcome="no_capacity"),
        ended(instance_id, continuations=1),
        ended(instance_id, nodes=["n2", "n1"]),
        ended(instance_id, tier="NIW"),
        ended(instance_id, completion_tokens=0, first_token_s=None),
        ended(instance_id, prompt_tokens=0),
        ended(pooled),
        ended(split),
        ended("gone"),
    )
    assert measure(world) == {}
    write(world, ended(instance_id))
    assert measure(world)[AT].requests == 1


def test_only_the_newest_are_read_and_of_a_sample_none_that_waited_long(world: World) -> None:
    instance_id = world.serve("n1", URL)
    at = [datetime.fromtimestamp(NOW_S - age_s, UTC) for age_s in (30, 20, 10)]
    slow = {"first_token_s": 12.0, "duration_s": 13.0}
    write(world, *(ended(instance_id, ended_at=each) for each in at[:2]), ended(instance_id, ended_at=at[2], **slow))
    assert measure(world)[AT].requests == 3
    assert measure(world, read_max=1)[AT].ttft_s == pytest.approx(11.99)
    assert measure(world, first_token_max_s=10.0)[AT].ttft_s == pytest.approx(0.1)


def test_a_wrong_profile_is_reported_and_the_plan_says_so(world: World, settings: Settings) -> None:
    instance_id = world.serve("n1", URL)
    state(world, LATENCY)
    write(world, *(ended(instance_id) for _ in range(120)))
    load(world, 400.0)
    found = compare(world.database, settings, now_s=NOW_S)
    [row] = rows(world)
    predicted = predict_latency(measure(world)[AT], [400.0], LATENCY)
    assert found == {AT: row.reason}
    assert (row.predicted_tbt_s, row.predicted_ttft_s) == (predicted.tbt_s, predicted.ttft_s)
    assert row.reason.startswith(
        "decode is slower than the profile says: first tokens after 100.0 ms and by the profile"
    )
    assert "tokens after 20.0 ms" in row.reason
    of = DraftOf(window_start_s=NOW_S // 3600 * 3600 + 3600, origin="operator", created_by="me")
    plan_id = write_draft(world.database, draft_plan(world.database, settings, of, now_s=NOW_S), now_s=NOW_S)
    assert plan_id is not None
    with world.database.transaction() as session:
        inputs: Any = inputs_of(session, plan_id)
        assert "latency is not what the profiles say of tide in us-east on H800" in get_plan(session, plan_id).reason
        words = explanation_of(session, plan_id)
    [recorded] = inputs["latencies"]
    assert (recorded["region"], recorded["tbt_s"]) == ("us-east", pytest.approx(0.02))
    assert f"tide in us-east on H800: {row.reason}" in words


def test_the_profile_counts_as_it_is_corrected(world: World, settings: Settings) -> None:
    """Its decode steps are taken to be twice what is stated, so 20 ms between tokens are right."""
    instance_id = world.serve("n1", URL)
    state(world, LATENCY)
    write(world, *(ended(instance_id) for _ in range(120)))
    load(world, 400.0)
    steps = StepCorrection(prefill_factor=1.0, decode_factor=2.0, reason="decode takes longer")
    with world.database.transaction() as session:
        kept = Correction(factor=1.0, reason="too few windows")
        put_correction(session, ModelGpu(model=MODEL, gpu_type="H800"), kept, steps, stated_tokens_per_s=1000.0)
    assert compare(world.database, settings, now_s=NOW_S) == {}
    [row] = rows(world)
    assert (row.differs, row.reason.split(":")[0]) == (False, "as the profile says")
    off = settings.model_copy(update={"profile_correction": False})
    assert list(compare(world.database, off, now_s=NOW_S)) == [AT], "what is stated counts"


def test_each_run_replaces_the_one_before_and_another_statement_drops_its_own(world: World, settings: Settings) -> None:
    instance_id = world.serve("n1", URL)
    write(world, *(ended(instance_id) for _ in range(3)))
    compare(world.database, settings, now_s=NOW_S)
    [row] = rows(world)
    assert (row.requests, row.reason, row.predicted_tbt_s) == (3, "the profile states no step times", None)
    state(world, LATENCY)
    assert rows(world) == [], "it was compared with another statement"
    compare(world.database, settings, now_s=NOW_S)
    assert [row.reason for row in rows(world)] == ["instances reported no load"]
    compare(world.database, settings, now_s=NOW_S + 7200)
    assert rows(world) == [], "no request in the last hour"


def test_a_sampled_log_is_read_without_those_that_are_always_logged(world: World, settings: Settings) -> None:
    instance_id = world.serve("n1", URL)
    write(world, ended(instance_id), ended(instance_id, first_token_s=12.0, duration_s=13.0))
    sampled = settings.model_copy(update={"request_log_sample": 0.1})
    for chosen, requests in ((settings, 2), (sampled, 1)):
        compare(world.database, chosen, now_s=NOW_S)
        assert [row.requests for row in rows(world)] == [requests]
    with world.database.transaction() as session:
        assert differing(session) == []


def test_a_log_of_errors_tells_nothing(world: World, settings: Settings) -> None:
    """Of the requests that went well it has those that waited long, and no others."""
    instance_id = world.serve("n1", URL)
    state(world, LATENCY)
    write(world, *(ended(instance_id, first_token_s=12.0, duration_s=13.0) for _ in range(120)))
    load(world, 400.0)
    assert list(compare(world.database, settings, now_s=NOW_S)) == [AT]
    errors = settings.model_copy(update={"request_log": "errors"})
    assert compare(world.database, errors, now_s=NOW_S) == {}
    assert rows(world) == []


def test_deferred_requests_beside_the_logged_ones_are_no_fault_of_the_profile(world: World, settings: Settings) -> None:
    """Of a sample, so many tokens are explained as the whole would."""
    instance_id = world.serve("n1", URL)
    state(world, LATENCY)
    write(world, *(ended(instance_id) for _ in range(120)))
    load(world, 400.0, instances=2)
    assert compare(world.database, settings, now_s=NOW_S) == {}
    [row] = rows(world)
    assert (row.predicted_tbt_s, row.reason) == (
        None,
        "other requests than the logged ones fill it: these explain 50% of its input tokens",
    )
    sampled = settings.model_copy(update={"request_log_sample": 0.5})
    assert list(compare(world.database, sampled, now_s=NOW_S)) == [AT]


def test_loads_are_of_the_time_in_which_the_requests_ended(world: World) -> None:
    instance_id = world.serve("n1", URL)
    write(world, *(ended(instance_id, ended_at=datetime.fromtimestamp(NOW_S - age_s, UTC)) for age_s in (900, 330, 30)))
    load(world, 100.0, age_s=900)
    for age_s in (600, 540, 480, 420, 360):
        load(world, 400.0, age_s=age_s)
    load(world, 200.0, age_s=300)
    with world.database.transaction() as session:
        assert measured_since_s(session, since_s=NOW_S - 3600) == NOW_S - 3600
        since_s = measured_since_s(session, since_s=NOW_S - 3600, read_max=2)
        assert since_s == NOW_S - 330
        found = read_loads(session, since_s=since_s)[AT]
    assert sorted(found.rates) == [200.0, 400.0]
    assert found.input_tokens == pytest.approx(30 * 400.0 + 60 * 200.0)


def test_requests_that_were_not_read_are_no_other_requests(world: World, settings: Settings) -> None:
    """The newest 120 are of five minutes, in which they explain all tokens; those before were as many."""
    instance_id = world.serve("n1", URL)
    state(world, LATENCY)
    at = [datetime.fromtimestamp(NOW_S - age_s, UTC) for age_s in (900, 300)]
    write(world, *(ended(instance_id, ended_at=each) for each in at for _ in range(120)))
    for age_s in (900, 300):
        load(world, 400.0, age_s=age_s)
    assert list(compare(world.database, settings, now_s=NOW_S, read_max=120)) == [AT]
    assert [row.requests for row in rows(world)] == [120]


def test_an_old_comparison_is_shown_no_more(world: World, settings: Settings) -> None:
    write(world, ended(world.serve("n1", URL)))
    compare(world.database, settings, now_s=NOW_S)
    with world.database.transaction() as session:
        session.execute(text("UPDATE latency_comparisons SET compared_at = now() - interval '119 minutes'"))
    assert len(rows(world)) == 1
    with world.database.transaction() as session:
        session.execute(text("UPDATE latency_comparisons SET compared_at = now() - interval '121 minutes'"))
    assert rows(world) == []


def test_two_runs_at_once_both_end(world: World) -> None:
    compared = {AT: (a_measurement(), LatencyComparison(predicted=None, differs=False, reason="no load"))}

    def put() -> None:
        with world.database.transaction() as session:
            put_comparisons(session, compared)

    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            put_comparisons(session, compared)
            other = threads.submit(put)
            until(world.is_waiting_for_a_lock)
        other.result()
    assert [row.reason for row in rows(world)] == ["no load"]
