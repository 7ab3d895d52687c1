"""The parts of the program one by one: where instances start from, pins, pools, the long tail."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Constraint, Placement
from controlplane.policies.placement.exact.program import Program
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PlacementSettings, PoolFacts, Profile
from controlplane.policies.placement.grid import grid_of
from dataplane.protocol.tiers import Tier
from tests.controlplane.policies.placement.problems import EAST, EXACT, WEST, after, cell, fleet, place

B_WEST = Endpoint(model="b", region="us-west")
ONE = {WEST: (1800.0,)}
"""Demand for one instance."""


def start_cost(facts: PlacementFacts) -> float:
    """What the plan pays for starts: the objective less GPUs and moves. A start from local weights costs 2 x 600 s."""
    placement = place(facts)
    assert placement.objective_per_hour is not None
    moves = sum(abs(entry.after - entry.before) for entry in placement.entries)
    return placement.objective_per_hour - placement.gpu_cost_per_hour - 0.002 * moves


@pytest.mark.parametrize(
    ("donated", "weights", "start_s"),
    [
        ({}, True, 600),
        ({}, False, 7200),
        ({cell("a", "us-west"): 1}, True, 60),
        ({cell("a", "us-west"): 1}, False, 60),  # it has its weights with it
        ({cell("b", "us-west"): 1}, True, 300),
        ({cell("b", "us-west"): 1}, False, 7200),
        ({cell("a", "us-east"): 1}, True, 600),  # of another region: no help
    ],
)
def test_where_an_instance_starts_from(donated: dict[EndpointGpu, int], start_s: int, *, weights: bool) -> None:
    facts = two_models(demand=ONE, donated=donated, weights_present=frozenset({WEST}) if weights else frozenset())
    assert start_cost(facts) == pytest.approx(2 * start_s / 3600)


def two_models(**changes: Any) -> PlacementFacts:
    profile = fleet().profiles[ModelGpu(model="a", gpu_type="H800")]
    profile = replace(profile, start=replace(profile.start, donated_other_s=300.0))
    given = {
        "models": (PlacementModel(name="a"), PlacementModel(name="b")),
        "profiles": {ModelGpu(model=name, gpu_type="H800"): profile for name in "ab"},
    }
    return fleet(**(given | changes))


def test_spot_is_taken_cheapest_first() -> None:
    """Five starts, two donated instances of a and one of b: 2 x 60 s + 300 s + 2 x 600 s."""
    facts = two_models(demand={WEST: (9000.0,)}, donated={cell("a", "us-west"): 2, cell("b", "us-west"): 1})
    assert start_cost(facts) == pytest.approx(2 * (2 * 60 + 300 + 2 * 600) / 3600)


def test_one_spot_instance_is_taken_once() -> None:
    """Both models start one; the one donated instance, of b, saves b 540 s or a 300 s: b gets it."""
    facts = two_models(
        demand={WEST: (1800.0,), B_WEST: (1800.0,)},
        donated={cell("b", "us-west"): 1},
        weights_present=frozenset({WEST, B_WEST}),
    )
    assert start_cost(facts) == pytest.approx(2 * (600 + 60) / 3600)


def test_a_spot_instance_is_worth_going_to() -> None:
    """Demand that any region may serve goes where it can start in a minute."""
    facts = fleet(demand=ONE, donated={cell("a", "us-east"): 1}, limits={WEST: (0, 0), EAST: (0, 8)})
    facts = replace(facts, regions=("us-east", "us-west"))
    assert after(choose_placement(facts, 0.0, replace(EXACT, epsilon=0.0))) == {("a", "us-east", "H800"): 1}


def test_pins_override_demand_limits_and_pools() -> None:
    facts = pooled_fleet(
        overrides={WEST: 3, EAST: 0},
        limits={WEST: (0, 1), EAST: (2, 4)},
        demand={WEST: (100.0,), EAST: (100.0,)},
    )
    placement = place(facts)
    assert after(placement) == {("a", "us-west", "H800"): 3}
    assert (placement.pooled, placement.below_minimum) == ((), ())
    assert [(entry.constraint, entry.reason) for entry in placement.entries] == [(Constraint.OVERRIDE, "pinned to 3")]
    assert placement.unserved[0].reason == "not served at home; pinned to 0 in us-east"


def test_a_pin_comes_before_demand_and_what_does_not_fit_is_listed() -> None:
    """Eight GPUs: b is pinned to ten. a, of the strictest tier, gets none."""
    facts = two_models(
        models=(PlacementModel(name="a", tier=Tier.IW_F), PlacementModel(name="b", tier=Tier.NIW)),
        demand={WEST: (15_000.0,)},
        overrides={B_WEST: 10},
        limits={EAST: (0, 0)},
    )
    placement = place(facts)
    assert after(placement) == {("b", "us-west", "H800"): 8}
    assert [(each.minimum, each.placed) for each in placement.below_minimum] == [(10, 8)]
    assert placement.below_minimum[0].reason == "pinned; GPUs full in us-west: H800 8 of 8"


def pooled_fleet(share: float = 0.1, host_bytes: int = 100, **changes: Any) -> PlacementFacts:
    """`fleet`, whose one model could be pooled in both regions: `share` of a GPU, 30 bytes of weights."""
    facts = fleet(**changes)
    pool = PoolFacts(
        occupancy={cell(model.name, region): share for model in facts.models for region in facts.regions},
        weights_bytes={model.name: 30 for model in facts.models},
        host_bytes_per_gpu={"H800": host_bytes},
    )
    return replace(facts, pool=pool)


def tail(models: int, share: float, host_bytes: int = 10_000, **changes: Any) -> PlacementFacts:
    """So many models with 5 tokens/s each in us-west."""
    names = [f"m{number:02d}" for number in range(models)]
    given: dict[str, Any] = {
        "models": tuple(PlacementModel(name=name) for name in names),
        "profiles": {ModelGpu(model=name, gpu_type="H800"): Profile(tokens_per_s=1900, gpus=1) for name in names},
        "demand": {Endpoint(model=name, region="us-west"): (5.0,) for name in names},
        "capacity": {RegionGpu(region="us-west", gpu_type="H800"): 20},
        "weights_present": frozenset(),
    }
    return pooled_fleet(share=share, host_bytes=host_bytes, **(given | changes))


def pools(placement: Placement) -> list[tuple[str, int, int]]:
    return [(pool.region, pool.before, pool.after) for pool in placement.pools]


@pytest.mark.parametrize(
    ("share", "host_bytes", "gpus"),
    [
        (0.1, 10_000, 2),  # 12 x 0.1 <= 0.8 x 2
        (0.2, 10_000, 3),  # 2.4 = 0.8 x 3
        (0.1, 100, 4),  # 12 x 30 bytes <= 4 x 100
    ],
)
def test_the_long_tail_shares_gpus(share: float, host_bytes: int, gpus: int) -> None:
    placement = place(tail(12, share, host_bytes))
    assert (after(placement), pools(placement)) == ({}, [("us-west", 0, gpus)])
    assert len(placement.pooled) == 12
    assert placement.gpu_cost_per_hour == 2.0 * gpus
    assert placement.unserved == ()


def test_without_pools_the_tail_takes_an_instance_each() -> None:
    """5 tokens/s are 0.3 % of an instance: still they are served where there are GPUs."""
    for demand in (5.0, 0.001):
        facts = replace(tail(12, 0.1), pool=None)
        placement = place(replace(facts, demand=dict.fromkeys(facts.demand, (demand,))))
        assert (sum(after(placement).values()), placement.unserved) == (12, ())


def test_the_head_keeps_instances_of_its_own() -> None:
    head = Endpoint(model="m00", region="us-west")
    facts = tail(6, 0.1, weights_present=frozenset({head}))
    assert facts.pool is not None
    occupancy = dict(facts.pool.occupancy) | {cell("m00", "us-west"): 6.5}
    facts = replace(facts, demand=dict(facts.demand) | {head: (9000.0,)}, pool=replace(facts.pool, occupancy=occupancy))
    placement = place(facts)
    assert after(placement) == {("m00", "us-west", "H800"): 5}
    assert (len(placement.pooled), pools(placement)) == (5, [("us-west", 0, 1)])


def test_a_pooled_endpoint_serves_its_own_demand_only() -> None:
    """800 tokens/s of us-east are pooled there; what us-west may leave to others, nobody serves from a pool."""
    facts = pooled_fleet(demand={WEST: (2300.0,), EAST: (800.0,)}, limits={WEST: (0, 1), EAST: (0, 1)})
    assert facts.pool is not None
    facts = replace(facts, pool=replace(facts.pool, occupancy={cell("a", "us-east"): 0.5}))
    placement = place(facts)
    assert after(placement) == {("a", "us-west", "H800"): 1, ("a", "us-east", "H800"): 1}, "1,100 over for us-west"
    placement = place(replace(facts, demand={WEST: (1900.0,), EAST: (800.0,)}, gpu_cost_per_hour={"H800": 0.5}))
    assert placement.unserved == ()


def test_pools_stay_where_they_are() -> None:
    """The same cost pooled on either GPU type: the present pool stays, and its endpoints in it."""
    gpu_types = ("A", "B")
    facts = replace(
        tail(4, 0.1),
        gpu_cost_per_hour={"H800": 9.0, "A": 2.0, "B": 2.0},
        capacity={RegionGpu(region="us-west", gpu_type=gpu_type): 4 for gpu_type in gpu_types},
    )
    keys = [cell(model.name, "us-west", gpu_type) for model in facts.models for gpu_type in gpu_types]
    for present in gpu_types:
        pool = PoolFacts(
            occupancy=dict.fromkeys(keys, 0.1),
            weights_bytes={model.name: 30 for model in facts.models},
            host_bytes_per_gpu=dict.fromkeys(gpu_types, 1000),
            present={PoolKey(region="us-west", gpu_type=present): 1},
            pooled=frozenset(key for key in keys if key.gpu_type == present),
        )
        placement = place(replace(facts, pool=pool))
        assert [(pool.gpu_type, pool.before, pool.after) for pool in placement.pools] == [(present, 1, 1)]
        assert all(each.before and each.cost_if_not == 0 for each in placement.pooled)


def test_what_no_pool_can_hold_is_not_pooled() -> None:
    """Too little host memory, an occupancy beyond all GPUs, or a maximum of none."""
    for facts in (
        pooled_fleet(host_bytes=3, demand=ONE),
        pooled_fleet(share=6.5, demand=ONE),
        pooled_fleet(limits={WEST: (0, 0), EAST: (0, 0)}, demand=ONE),
    ):
        assert not [option for option in grid_of(facts, EXACT).options if option.key.region == "us-west"]


def test_the_relaxation_knows_that_a_small_model_takes_a_whole_instance() -> None:
    """Rows count an instance for no more than they ask: the linear bound of 12 small models is 12 instances."""
    problem = Program(grid_of(replace(tail(12, 0.1), pool=None), PlacementSettings())).problem
    coefficients = [value for row in problem.constraints() for value in row.values()]
    assert max(abs(value) for value in coefficients) <= 1.0
