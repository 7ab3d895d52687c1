"""Worlds whose instances come and go: what must hold under every strategy and while nodes fail."""

from collections import Counter
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.policies.assignment.facts import InstanceChange, SlotDecision
from controlplane.policies.facts import Endpoint
from controlplane.policies.scale import ScaleDecision
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.planning import Strategy
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.world import planning
from ops.simulator.world.fleet import Fleet
from tests.ops.simulator.scaled import REGIONS, node, run_checked, scaled

STRATEGIES = list(get_args(Strategy))
BURST = {"bursts": [{"start_s": 450, "duration_s": 100, "factor": 4}]}
FAILURES = [
    {"region": "east", "node": 0, "at_s": 500, "down_s": 150, "noticed_s": 40},
    {"region": "west", "rate_per_day": 200, "down_s": 100, "noticed_s": 40},
]


def served_of(scenario: Scenario, seed: int) -> Counter[tuple[str, str]]:
    learn_s = scenario.planning.learn_s
    return Counter((one.model, one.tier) for one in traffic_of(scenario, seed) if one.arrived_s >= learn_s)


@settings(max_examples=4)
@given(
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 1000),
    failures=st.sampled_from([[], FAILURES]),
    admission=st.booleans(),
    gpu_types=st.sampled_from([["H800"], ["H800", "H20"]]),
)
def test_each_request_ends_once_and_no_gpu_is_held_twice(
    strategy: str, seed: int, failures: list[Any], admission: bool, gpu_types: list[str]
) -> None:
    nodes = [node(region, name, slots=3) for region in REGIONS for name in gpu_types * (2 // len(gpu_types))]
    fleet, policy = {"nodes": nodes}, {"admission": admission}
    scenario = scaled(strategy, traffic=BURST, failures=failures, policy=policy, fleet=fleet)
    world, fleet, _ = build_world(scenario, seed)
    assert fleet is not None
    run_checked(world, partial(check_gpus, fleet))
    assert {key: tally.requests for key, tally in world.tallies.items()} == served_of(scenario, seed)
    assert world.in_flight == 0
    assert sum(tally.failed for tally in world.tallies.values()) == sum(world.failures.values())
    for tally in world.tallies.values():
        assert tally.ttft.max_s <= tally.service.max_s
    held_s = sum(use.gpus * total_s for use, total_s in world.usage.seconds(world.events.now_s).items())
    gpus = sum(sum(node.layout) for node in fleet.nodes.values())
    assert 0 < held_s <= gpus * (world.events.now_s - scenario.planning.learn_s) * (1 + 1e-9)


def check_gpus(fleet: Fleet) -> None:
    """No GPU is held twice."""
    held = Counter[tuple[str, int]]()
    for one in fleet.hosted.values():
        held[one.node.name, one.slot] += one.gpus
    assert all(count <= fleet.layouts.gpus_of(ref) for ref, count in held.items())


def test_the_same_seed_gives_the_same_log_and_result() -> None:
    scenario = scaled("lt-ua", traffic=BURST, failures=FAILURES)
    one, same, other = (simulate(scenario, seed=seed).result for seed in (1, 1, 2))
    volatile = {"seconds", "requests_per_s"}
    assert one.model_dump(exclude=volatile) == same.model_dump(exclude=volatile)
    assert one.event_log_hash != other.event_log_hash


def test_who_lags_behind_lives_through_the_same() -> None:
    """Instances are looked at when somebody asks; whether they are, or have an event for each end, is all one."""
    scenario = scaled("siloed", traffic=BURST, failures=FAILURES)
    lagging, prompt = (build_world(scenario, 1)[0] for _ in range(2))
    prompt.events.keep_up()
    for world in (lagging, prompt):
        assert list(world.run())
    assert prompt.events.count > 2 * lagging.events.count
    assert prompt.log.digest == lagging.log.digest
    assert prompt.events.now_s == lagging.events.now_s
    assert prompt.request_seconds == pytest.approx(lagging.request_seconds)
    assert prompt.recorder.series() == lagging.recorder.series()


def test_no_request_is_sent_to_what_warms_up_drains_or_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    states: set[str] = set()
    world, fleet, _ = build_world(scaled("reactive", traffic=BURST, failures=FAILURES), 1)
    assert fleet is not None
    real = DedicatedServer.submit

    def watch(self: DedicatedServer, served: Any) -> None:
        [held] = [one for one in fleet.hosted.values() if one.server is self]
        states.add(held.state)
        assert held.node.name not in fleet.down
        real(self, served)

    monkeypatch.setattr(DedicatedServer, "submit", watch)
    assert list(world.run())
    assert states == {"serving"}
    assert min(fleet.failures, fleet.interrupted, fleet.scale_outs) > 0


def test_instances_are_ready_when_their_start_takes() -> None:
    """Fresh with weights, without, from spot of its own, and in the place of another's spot."""
    scenario = scaled(
        "reactive",
        traffic=BURST | {"zipf": 1.5},
        provisioning={"weights": {"a": ["east"]}},
        fleet={"nodes": [{"region": region, "count": 1, "slots": 3} for region in REGIONS]},
        scaling={"out_above": 0.4, "in_below": 0.2},
    )
    world, fleet, _ = build_world(scenario, 1)
    assert fleet is not None
    takes_s = {"spot_same": 20.0, "spot_other": 60.0, "local": 60.0, "remote": 300.0}
    ready_s: dict[str, float] = {}
    waits_s: Counter[float] = Counter()

    def check() -> None:
        for name, one in fleet.hosted.items():
            if one.state == "warming" and ready_s.get(name) != one.ready_s:
                ready_s[name] = one.ready_s
                waits_s[round(one.ready_s - world.events.now_s, 6)] += 1

    run_checked(world, check)
    started = Counter[float]()
    for start, count in fleet.starts.items():
        if start != "present":
            started[takes_s[start]] += count
    assert fleet.starts.keys() >= {"present", "local"}
    assert waits_s == started
    assert any(use.state == "warming" for use in world.usage.seconds(world.events.now_s))


def test_forecasts_see_nothing_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    real = planning.forecast_peak
    world_now = [0.0]
    real_forecast, real_make, real_mean = planning.Planner.forecast, planning.Planner.make, planning.Demand.mean

    def forecast(self: planning.Planner, now_s: float) -> None:
        world_now[0] = now_s
        real_forecast(self, now_s)

    def make(self: planning.Planner, now_s: float, fleet: Any) -> None:
        world_now[0] = now_s
        real_make(self, now_s, fleet)

    def mean(
        self: planning.Demand, endpoint: Any, *, until_s: float, deferred: bool = False, **since_s: float
    ) -> float:
        if deferred:
            asked.append((world_now[0], until_s))
        return real_mean(self, endpoint, until_s=until_s, deferred=deferred, **since_s)

    def watch(series: Any, *rest: Any) -> Any:
        asked.append((world_now[0], series.end_s))
        return real(series, *rest)

    monkeypatch.setattr(planning.Planner, "forecast", forecast)
    monkeypatch.setattr(planning.Planner, "make", make)
    monkeypatch.setattr(planning.Demand, "mean", mean)
    monkeypatch.setattr(planning, "forecast_peak", watch)
    outcome = simulate(scaled("lt-i", traffic={"duration_s": 3900.0, "rate_per_s": 0.3}))
    assert len({now_s for now_s, _ in asked}) >= 2
    assert all(end_s <= now_s for now_s, end_s in asked)
    east = next(one for one in outcome.result.series.endpoints if (one.model, one.region) == ("a", "east"))
    assert east.planned[-1] is not None
    assert east.forecast[0] is not None


def test_what_was_learnt_is_not_served() -> None:
    scenario = scaled("lt-i")
    outcome = simulate(scenario)
    assert outcome.result.requests == sum(served_of(scenario, scenario.seed).values())
    assert outcome.result.series.start_s == 300
    assert outcome.world.demand.mean(next(iter(outcome.world.demand.endpoints)), since_s=0, until_s=300) > 0


def test_nothing_may_come_after_what_was_learnt() -> None:
    result = simulate(scaled("lt-i", planning={"learn_s": 960})).result
    assert (result.requests, result.simulated_s, result.totals.cost) == (0, 0.0, 0.0)


def test_the_oracle_plans_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an oracle does not forecast")

    monkeypatch.setattr(planning, "forecast_peak", never)
    result = simulate(scaled("oracle")).result
    for endpoint in result.series.endpoints:
        assert all(peak is not None for peak in endpoint.forecast)


def test_deferred_requests_expire_where_nothing_serves_them() -> None:
    fleet = {"instances": [{"model": "a", "region": "east", "count": 1, "kind": "IW"}]}
    scenario = scaled(
        "siloed",
        traffic={"tiers": {"IW-N": 1, "NIW": 1}, "duration_s": 600.0, "zipf": 8.0},
        fleet=fleet,
        scaling={"instances_min": 1, "instances_max": 2},
        targets={"NIW": {"ttft_s": 30.0, "tbt_s": 1.0}},
        provisioning={"local_s": 5000},
    )
    result = simulate(scenario).result
    expired = result.failures["its deadline passed while it waited"]
    queue = next(queue for queue in result.series.queues if queue.model == "a")
    assert 0 < expired <= sum(row.failed for row in result.rows if row.tier == "NIW")
    assert max(queue.waiting) > 0
    assert max(queue.age_s) <= 31.0


def test_spot_of_a_failed_node_is_lent_no_more() -> None:
    _, fleet, _ = build_world(
        scaled("lt-i", fleet={"nodes": [{"region": region, "slots": 3} for region in REGIONS]}), 1
    )
    assert fleet is not None
    first = next(iter(fleet.hosted))
    donated = (InstanceChange(instance_id=first, reason="not needed"),)
    fleet.apply(ScaleDecision(slots=SlotDecision(donates=donated)))
    assert fleet.hosted[first].state == "spot"
    others = fleet.hosted.keys() - {first}
    assert any(fleet.hosted[name].node is fleet.hosted[first].node for name in others)
    fleet.fail(fleet.hosted[first].node.name)
    assert fleet.hosted.keys() == others, "what is our own is missed later"


def test_deferred_demand_is_of_the_hours_that_were_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    real = planning.Demand.mean

    def mean(self: planning.Demand, endpoint: Any, *, since_s: float, until_s: float, deferred: bool = False) -> float:
        if deferred:
            asked.append(since_s)
        return real(self, endpoint, since_s=since_s, until_s=until_s, deferred=deferred)

    monkeypatch.setattr(planning.Demand, "mean", mean)
    simulate(scaled("lt-i", traffic={"duration_s": 3900.0, "rate_per_s": 0.05}, planning={"learn_s": 1800}))
    assert set(asked) == {1800.0}


def test_time_is_all_accounted_for() -> None:
    """The series add up to the totals, but for the step that is not over."""
    result = simulate(scaled("lt-u", traffic=BURST)).result
    hours = sum(
        sum(map(sum, one.serving.values())) + sum(one.warming) + sum(one.draining) + sum(one.spot)
        for one in result.series.endpoints
    ) * (result.series.step_s / 3600)
    total = sum(result.totals.gpu_hours.values())
    steps_s = len(result.series.tiers[0].ended) * result.series.step_s
    assert hours <= total
    assert total - hours <= (result.simulated_s - steps_s) / 3600 * result.slots


def test_offered_load_counts_each_request_once_whatever_refuses_or_interrupts_it() -> None:
    """As the live service counts it: interactive requests that are refused and come again, and deferred ones that lose
    their node, are the load of one request.
    """
    scenario = scaled(
        "reactive",
        traffic={"bursts": [{"start_s": 450, "duration_s": 100, "factor": 25}], "tiers": {"IW-F": 1, "NIW": 2}},
        failures=[{"region": region, "rate_per_day": 600, "down_s": 20, "noticed_s": 10} for region in REGIONS],
        policy={"admission": True, "tries_max": 3},
        scaling={"instances_min": 1, "instances_max": 1},
    )
    outcome = simulate(scenario)
    demand, learn_s = outcome.world.demand, scenario.planning.learn_s
    until_s = (outcome.result.simulated_s + learn_s) // 60 * 60 + 60
    offered, counted = Counter[bool](), Counter[bool]()
    for deferred in (False, True):
        for model in ("a", "b"):
            for region in REGIONS:
                endpoint = Endpoint(model=model, region=region)
                rate = demand.mean(endpoint, since_s=0.0, until_s=until_s, deferred=deferred)
                offered[deferred] += round(rate * until_s)
    for request in traffic_of(scenario, scenario.seed):
        if request.tier != "NIW" or request.arrived_s >= learn_s:
            counted[request.tier == "NIW"] += request.prompt_tokens
    assert outcome.result.totals.interrupted > 0
    assert any(reason.startswith("refused") for reason in outcome.result.failures)
    assert offered == counted


def test_requests_of_an_adapter_with_its_base_are_requests_of_the_base() -> None:
    whole = scaled()
    models = [model.model_dump(exclude_unset=True) for model in whole.models]
    beside = {"name": "x", "base": "a", "with_base": True, "weights_bytes": 10**8, "kv_bytes_per_token": 800_000}
    both = scaled(models=[*models, beside], traffic={"zipf": 0.0})
    requests = list(traffic_of(both, 1))
    assert any(request.model == "x" for request in requests)
    renamed = [replace(one, model="a") if one.model == "x" else one for one in requests]
    result, same = simulate(both, seed=1).result, simulate(whole, seed=1, traffic=renamed).result
    assert result.event_log_hash == same.event_log_hash
    assert {row.model for row in result.rows} == {"a", "b"}
