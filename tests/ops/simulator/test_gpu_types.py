"""Fleets of several GPU types: each with its own capacity, latency, memory and price; and errors that name the key."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies import hour
from controlplane.policies.facts import RegionGpu
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.facts import PlacementFacts
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.profile import ProfileError, load_gpu_profile
from ops.simulator.results.results import Result, held_hours
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.means import model_costs
from ops.simulator.scenario.planning import Strategy
from ops.simulator.scenario.scenario import Scenario, ScenarioError, load_scenario
from tests.ops.simulator.examples import EXAMPLES, changed
from tests.ops.simulator.scaled import KV_BYTES, PATHS, PROFILE, REGIONS, node, scaled

STRATEGIES = list(get_args(Strategy))
TYPES = EXAMPLES / "simulate-types.toml"
SIZES = {"weights_bytes": 15 * 10**9, "kv_bytes_per_token": 800_000}


def models(**rates: Any) -> list[dict[str, Any]]:
    return [{"name": name, "tokens_per_s": rate, **SIZES} for name, rate in rates.items()]


def volatile(result: Result) -> Mapping[str, Any]:
    return result.model_dump(exclude={"seconds", "requests_per_s"})


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlacementFacts, Placement]]:
    """Every plan that is made, and from what."""
    made: list[tuple[PlacementFacts, Placement]] = []
    real = hour.choose_placement

    def watch(facts: PlacementFacts, *rest: Any, **named: Any) -> Placement:
        made.append((facts, real(facts, *rest, **named)))
        return made[-1][1]

    monkeypatch.setattr(hour, "choose_placement", watch)
    return made


@settings(max_examples=6)
@given(
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 1000),
    slots=st.tuples(*[st.integers(1, 3)] * 4),
    on=st.sampled_from([(400.0, 600.0), ({"H800": 400.0, "H20": 250.0}, 600.0), ({"H20": 300.0}, {"H800": 500.0})]),
)
def test_each_type_has_its_own_gpus_latency_memory_and_price(
    strategy: str, seed: int, slots: tuple[int, ...], on: tuple[Any, Any]
) -> None:
    shapes = list(zip([(region, name) for region in REGIONS for name in PATHS], slots, strict=True))
    nodes = [node(region, name, slots=count, count=2) for (region, name), count in shapes]
    placed = {model: set(PATHS) if isinstance(rate, float) else {*rate} for model, rate in zip("ab", on, strict=True)}
    fleet = {"nodes": nodes, "instances": [{"model": model, "region": "east"} for model in placed]}
    with pytest.MonkeyPatch.context() as monkeypatch:
        made: list[Placement] = []
        real = hour.choose_placement

        def watch(*each: Any, **named: Any) -> Placement:
            made.append(real(*each, **named))
            return made[-1]

        monkeypatch.setattr(hour, "choose_placement", watch)
        scenario = scaled(strategy, models=models(a=on[0], b=on[1]), fleet=fleet, traffic={"zipf": 0.5})
        outcome = simulate(scenario, seed=seed)
    assert outcome.fleet is not None
    capacity = {RegionGpu(region=region, gpu_type=name): 2 * count for (region, name), count in shapes}
    for plan in made:
        planned = Counter[RegionGpu]()
        for entry in plan.entries:
            planned[entry.key.place] += entry.after
        assert all(count <= capacity[place] for place, count in planned.items())
    for one in outcome.fleet.hosted.values():
        gpu_type, [report] = one.node.gpu_type, one.server.reports()
        assert report.gpu_type == gpu_type
        assert gpu_type in placed[one.endpoint.model]
        latency = load_gpu_profile(PATHS[gpu_type]).nearest_model(15 * 10**9).latency
        assert report.prefill_token_s == latency.prefill_per_token_s
        assert report.kv_capacity_bytes == KV_BYTES[gpu_type] // 800_000 * 800_000
    totals, passed_h = outcome.result.totals, outcome.result.simulated_s / 3600
    for gpu_type, one in totals.gpu_types.items():
        gpus = sum(count for place, count in capacity.items() if place.gpu_type == gpu_type)
        assert sum(one.gpu_hours.values()) <= gpus * passed_h * (1 + 1e-9)
        price = load_gpu_profile(PATHS[gpu_type]).cost_per_hour
        assert one.cost == pytest.approx(price * held_hours(one.gpu_hours))
    assert totals.cost == pytest.approx(sum(one.cost for one in totals.gpu_types.values()))
    for state, hours in totals.gpu_hours.items():
        assert hours == pytest.approx(sum(one.gpu_hours.get(state, 0.0) for one in totals.gpu_types.values()))


def test_an_instance_of_two_gpus_has_their_latency_their_memory_and_both_ways_to_the_host() -> None:
    two = [{"gpus": 2, **one} for one in models(a=900.0)]
    nodes = [node(region, "H800", slots=1, gpus=2) for region in REGIONS]
    scenario = scaled(models=two, fleet={"nodes": nodes, "instances": [{"model": "a", "region": "east"}]})
    h800, [model] = load_gpu_profile(PATHS["H800"]), scenario.models
    costs = model_costs("a", model, h800)
    assert costs.latency == h800.nearest_model(15 * 10**9, gpus=2).latency != h800.nearest_model(15 * 10**9).latency
    assert costs.bytes_per_s == 2 * h800.pcie_bytes_per_s * h800.transfer_efficiency
    _, fleet, _ = build_world(scenario, 1)
    assert fleet is not None
    [report] = next(iter(fleet.hosted.values())).server.reports()
    assert report.kv_capacity_bytes == 2 * KV_BYTES["H800"] // 800_000 * 800_000


@pytest.mark.parametrize(("cheap", "dear"), [("H20", "H800"), ("H800", "H20")])
def test_plans_fill_the_cheap_type_first(
    placements: list[tuple[PlacementFacts, Placement]], cheap: str, dear: str
) -> None:
    """Though what is there at first is dear; the rest goes there only where the cheap ones are all taken."""
    outcome = simulate(
        scaled(
            "oracle",
            models=models(a=300.0, b=300.0),
            traffic={"rate_per_s": 2.5},
            fleet={
                "nodes": [node(region, name, slots=2) for region in REGIONS for name in PATHS],
                "cost_per_hour": {cheap: 1.0, dear: 3.0},
                "instances": [{"model": model, "region": "east", "gpu_type": dear} for model in ("a", "b")],
            },
            provisioning={"local_s": 60, "spot_other_s": 60},
        )
    )
    facts, first = placements[0]
    assert {key.gpu_type for key in facts.present} == {dear}, "as fleet.instances say"
    counts = Counter[tuple[str, str]]()
    for entry in first.entries:
        counts[entry.endpoint.region, entry.gpu_type] += entry.after
    assert [counts[region, cheap] for region in REGIONS] == [2, 2]
    assert 0 < sum(counts[region, dear] for region in REGIONS) < 4
    totals = outcome.result.totals
    assert totals.gpu_types[cheap].cost == pytest.approx(held_hours(totals.gpu_types[cheap].gpu_hours))
    assert totals.gpu_types[dear].cost == pytest.approx(3.0 * held_hours(totals.gpu_types[dear].gpu_hours))


def fixed(gpu_types: Mapping[str, str]) -> Scenario:
    """One instance of each model in each region, for good, on the GPU type that the model goes to. Nothing is deferred:
    what waits of one model makes the dispatcher look at all instances, and later requests go by that look.
    """
    return scaled(
        "reactive",
        traffic={"tiers": {"IW-F": 2, "IW-N": 1}},
        models=models(**{name: {gpu_type: 400.0} for name, gpu_type in gpu_types.items()}),
        fleet={"nodes": [node(region, name, slots=2) for region in REGIONS for name in sorted({*gpu_types.values()})]},
        scaling={"instances_min": 1, "instances_max": 1},
    )


def test_a_model_is_served_as_its_own_type_serves_it() -> None:
    """In a fleet of two types each model fares as in a fleet of its type alone."""
    both = simulate(fixed({"a": "H800", "b": "H20"})).result
    alone = {name: simulate(fixed({"a": name, "b": name})).result for name in PATHS}
    for model, gpu_type, other in (("a", "H800", "H20"), ("b", "H20", "H800")):
        of = {name: [row for row in one.rows if row.model == model] for name, one in alone.items()}
        assert [row for row in both.rows if row.model == model] == of[gpu_type]
        assert of[gpu_type] != of[other]
    assert both.totals.gpu_types["H20"].gpu_hours == both.totals.gpu_types["H800"].gpu_hours
    assert both.totals.gpu_types["H20"].cost < both.totals.gpu_types["H800"].cost


def test_a_fleet_of_one_type_is_the_same_with_explicit_types() -> None:
    plain = scaled("lt-ua")
    explicit = scaled(
        "lt-ua",
        models=[{"gpus": {"H800": 1}, **one} for one in models(a={"H800": 400.0}, b={"H800": 600.0})],
        fleet={
            "profile": PATHS["H20"],
            "kv_bytes": 1,
            "nodes": [node(region, "H800", slots=3) for region in REGIONS for _ in range(2)],
            "instances": [
                {"model": model, "region": region, "gpu_type": "H800"} for model in ("a", "b") for region in REGIONS
            ],
        },
    )
    assert volatile(simulate(plain).result) == volatile(simulate(explicit).result)


def test_reactive_scaling_takes_the_type_that_has_room() -> None:
    """Nothing but H800 is free at first, and nothing but H20 is left for what the load asks for."""
    outcome = simulate(
        scaled(
            "reactive",
            fleet={
                "nodes": [node("east", "H800", slots=2), node("east", "H20", slots=3)],
                "instances": [{"model": model, "region": "east", "gpu_type": "H800"} for model in ("a", "b")],
            },
            traffic={"rate_per_s": 3.0, "origins": {"east": 1}},
            scaling={"instances_min": 0},
        )
    )
    assert outcome.result.totals.gpu_types["H20"].gpu_hours["serving"] > 0


def test_the_example_takes_h20_while_they_are_cheap(placements: list[tuple[PlacementFacts, Placement]]) -> None:
    for price in (1.2, 2.5):
        short = ["traffic.duration_s=7230", f"fleet.cost_per_hour.H20={price}"]
        assert simulate(load_scenario(TYPES, settings=short)).result.requests > 0
    cheap, dear = (Counter({(e.endpoint.region, e.gpu_type): e.after for e in made.entries}) for _, made in placements)
    assert (cheap["us-east", "H20"], cheap["us-east", "H800"]) == (3, 1)
    assert (dear["us-east", "H20"], dear["us-east", "H800"]) == (0, 3)


def bad(folder: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """A change of the example, and the error of it."""
    (folder / "other.toml").write_text(PROFILE.read_text().replace("cost_per_hour = 2.5", "cost_per_hour = 2.6"))
    rates, h20 = (
        "tokens_per_s = { H800 = 1900, H20 = 1250 } ",
        'slots = 3, profile = "h20.toml", kv_bytes = 58_000_000_000',
    )
    yield (
        ('us-west", slots = 4', 'us-west", profile = "other.toml", slots = 4'),
        "fleet.nodes.1.profile: is not that of fleet.nodes.0; both are of H800",
    )
    yield (
        ('us-west", slots = 4', 'us-west", kv_bytes = 1, slots = 4'),
        "fleet.nodes.1.kv_bytes: is not that of fleet.nodes.0; both are of H800",
    )
    yield (rates, "tokens_per_s = { H100 = 1 } "), "models.0.tokens_per_s: 'H100' is none of H20, H800"
    yield (rates, "tokens_per_s = {} "), "models.0.tokens_per_s: Dictionary should have at least 1 item"
    yield (rates, "tokens_per_s = -1 "), "models.0.tokens_per_s: Input should be greater than 0"
    yield (rates, "tokens_per_s = { H20 = 0 } "), "models.0.tokens_per_s.H20: Input should be greater than 0"
    yield (rates, ""), "models.0.tokens_per_s: is needed where [scaling] is"
    yield ("gpus = 1 ", "gpus = { H20 = 1 } "), "models.0.gpus: must name the GPU types of tokens_per_s: H20, H800"
    yield ("gpus = 1 ", "gpus = { H20 = 1, A = 1 } "), "models.0.gpus: 'A' is none of H20, H800"
    yield (rates, "tokens_per_s = { H20 = 9 } "), "fleet.instances.0.gpu_type: tokens_per_s of 13B names no H800"
    yield ('gpu_type = "H800"', 'gpu_type = "A"'), "fleet.instances.0.gpu_type: 'A' is none of H20, H800"
    yield ("{ H20 = 1.2 }", "{ A = 1 }"), "fleet.cost_per_hour: 'A' is none of H20, H800"
    yield ("{ H20 = 1.2 }", "{ H20 = -1 }"), "fleet.cost_per_hour.H20: Input should be greater than"
    yield (h20, 'slots = 3, profile = "none.toml"'), "none.toml: cannot be read"


def test_errors_name_the_key(tmp_path: Path) -> None:
    for change, message in bad(tmp_path):
        with pytest.raises((ScenarioError, ProfileError)) as caught:
            build_world(load_scenario(changed(TYPES, tmp_path, change)), 1)
        assert message in str(caught.value), change


def test_what_is_not_scaled_is_of_the_type_of_the_fleet(tmp_path: Path) -> None:
    small = EXAMPLES / "simulate-small.toml"
    path = changed(small, tmp_path, ('region = "us-east", count = 2', 'region = "us-east", gpu_type = "H20"'))
    with pytest.raises(ScenarioError, match=r"fleet.instances.0.gpu_type: 'H20' is none of H800"):
        simulate(load_scenario(path))


def test_requests_go_where_they_have_room() -> None:
    """In the region that is nearest to most of them half of the requests are longer than the KV memory of a GPU."""
    small, large = (
        node("east", "H800", slots=3, kv_bytes=800 * SIZES["kv_bytes_per_token"]),
        node("west", "H20", slots=3),
    )
    placed = [
        {"model": model, "region": part["region"], "gpu_type": gpu_type}
        for model in "ab"
        for part, gpu_type in ((small, "H800"), (large, "H20"))
    ]
    scenario = scaled(
        "reactive",
        models=models(a=400.0, b=600.0),
        fleet={"nodes": [small, large], "instances": placed},
        scaling={"instances_max": 1},
        traffic={"rate_per_s": 2.0},
    )
    outcome = simulate(scenario)
    assert outcome.result.failures == {}
    long = [one for one in traffic_of(scenario, scenario.seed) if one.prompt_tokens + one.output_tokens > 800]
    assert Counter((one.origin, one.tier is Tier.NIW) for one in long).keys() == {
        (region, deferred) for region in REGIONS for deferred in (False, True)
    }
