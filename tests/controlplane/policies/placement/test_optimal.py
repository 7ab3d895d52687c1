"""Placement against every possible placement, on instances small enough to try them all."""

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu, Tier
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import Placement, PlacementFacts, PlacementModel, PlacementSettings, Profile

EXACT = PlacementSettings(gap=0.0)


def place(facts: PlacementFacts) -> Placement:
    return choose_placement(facts, 7.0, EXACT)


@st.composite
def small_facts(draw: st.DrawFn) -> PlacementFacts:
    """At most four cells of at most four GPUs: few enough to try every placement."""
    models, regions, gpu_types = draw(
        st.sampled_from([("a", "rs", "H"), ("ab", "rs", "H"), ("a", "rs", "HL"), ("ab", "r", "HL")])
    )
    endpoints = [Endpoint(model=model, region=region) for model in models for region in regions]
    windows = draw(st.integers(1, 2))
    amounts = st.integers(0, 60).map(lambda hundreds: 100.0 * hundreds)
    profiles = {
        ModelGpu(model=model, gpu_type=gpu_type): Profile(
            tokens_per_s=draw(st.sampled_from([700.0, 1300.0, 1900.0])),
            gpus=draw(st.integers(1, 2)),
            load_time_s=draw(st.sampled_from([0.0, 600.0])),
        )
        for model in models
        for gpu_type in gpu_types
    }
    limits = {}
    for endpoint in endpoints:
        fewest = draw(st.integers(0, 2))
        limits[endpoint] = (fewest, draw(st.integers(max(1, fewest), 4)))
    return PlacementFacts(
        regions=tuple(regions),
        models=tuple(PlacementModel(name=name, tier=draw(st.sampled_from([Tier.IW_F, Tier.IW_N]))) for name in models),
        capacity={
            RegionGpu(region=region, gpu_type=gpu_type): draw(st.integers(0, 4))
            for region in regions
            for gpu_type in gpu_types
        },
        profiles=profiles,
        present={
            EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type): draw(st.integers(0, 2))
            for endpoint in endpoints
            for gpu_type in gpu_types
        },
        demand={endpoint: tuple(draw(amounts) for _ in range(windows)) for endpoint in endpoints},
        limits=limits,
        gpu_cost_per_hour={gpu_type: draw(st.sampled_from([1.0, 2.0, 3.5])) for gpu_type in gpu_types},
        weights_present=frozenset(endpoint for endpoint in endpoints if draw(st.booleans())),
    )


def _wanted(facts: PlacementFacts, model: str) -> bool:
    return any(max(facts.demand[e]) > 0 or facts.limits[e][0] for e in facts.demand if e.model == model)


def _room(facts: PlacementFacts, key: EndpointGpu) -> int:
    gpus = facts.profiles[ModelGpu(model=key.model, gpu_type=key.gpu_type)].gpus
    capacity = facts.capacity[RegionGpu(region=key.region, gpu_type=key.gpu_type)]
    return min(capacity // gpus, facts.limits[Endpoint(model=key.model, region=key.region)][1])


def cost_of(facts: PlacementFacts, how: PlacementSettings, counts: Mapping[EndpointGpu, int]) -> float:
    """Section 2 of the ILP once more, straight from the sums: the price of one placement, infinite if not allowed."""
    keys = list(facts.present)
    profile = {key: facts.profiles[ModelGpu(model=key.model, gpu_type=key.gpu_type)] for key in keys}
    price = {key: profile[key].gpus * facts.gpu_cost_per_hour[key.gpu_type] for key in keys}
    start = {
        key: price[key]
        * profile[key].load_time_s
        / 3600
        * (1 if Endpoint(model=key.model, region=key.region) in facts.weights_present else how.start_remote_ratio)
        for key in keys
    }
    for at, capacity in facts.capacity.items():
        if (
            sum(profile[k].gpus * counts[k] for k in keys if (k.region, k.gpu_type) == (at.region, at.gpu_type))
            > capacity
        ):
            return math.inf
    live = [key for key in keys if facts.present[key] or (_wanted(facts, key.model) and _room(facts, key))]
    dearest_token = max(((price[k] + start[k]) / profile[k].tokens_per_s for k in live), default=1.0)
    dearest = max((price[k] + start[k] for k in live), default=1.0)
    move = how.move_ratio * min((price[k] for k in live), default=1.0)
    total = 0.0
    for key in live:
        started = max(0, counts[key] - facts.present[key])
        total += price[key] * counts[key] + start[key] * started + move * (2 * started - counts[key])
    for model in facts.models:
        each = how.unserved_ratios[model.tier] * dearest_token
        here = [e for e in facts.demand if e.model == model.name]
        for e in here:
            mine = [k for k in keys if (k.model, k.region) == (e.model, e.region)]
            if sum(counts[k] for k in mine) > facts.limits[e][1]:
                return math.inf
            total += how.minimum_ratio * dearest * max(0, facts.limits[e][0] - sum(counts[k] for k in mine))
            served = sum(profile[k].tokens_per_s * counts[k] for k in mine)
            total += each / 2 * max(0.0, how.epsilon * max(facts.demand[e]) - served)
        served = sum(profile[k].tokens_per_s * counts[k] for k in keys if k.model == model.name)
        total += each * max(0.0, max(map(sum, zip(*(facts.demand[e] for e in here), strict=True))) - served)
    return total


@settings(max_examples=60, deadline=None)
@given(facts=small_facts())
def test_no_placement_is_cheaper(facts: PlacementFacts) -> None:
    placement = place(facts)
    keys = list(facts.present)
    chosen = dict.fromkeys(keys, 0)
    for entry in placement.entries:
        at = entry.endpoint
        chosen[EndpointGpu(model=at.model, region=at.region, gpu_type=entry.gpu_type)] = entry.after
    choices = itertools.product(
        *(range(facts.capacity[RegionGpu(region=k.region, gpu_type=k.gpu_type)] + 1) for k in keys)
    )
    best = min(cost_of(facts, EXACT, dict(zip(keys, counts, strict=True))) for counts in choices)
    found = cost_of(facts, EXACT, chosen)
    assert math.isfinite(found), "over capacity or over a maximum"
    assert found == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert placement.objective_per_hour == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert all(entry.reason for entry in placement.entries)


def turned(facts: PlacementFacts) -> PlacementFacts:
    """The same facts in the opposite order."""
    return PlacementFacts(
        regions=facts.regions[::-1],
        models=facts.models[::-1],
        capacity=dict(reversed(list(facts.capacity.items()))),
        profiles=dict(reversed(list(facts.profiles.items()))),
        present=dict(reversed(list(facts.present.items()))),
        demand=dict(reversed(list(facts.demand.items()))),
        limits=dict(reversed(list(facts.limits.items()))),
        gpu_cost_per_hour=dict(reversed(list(facts.gpu_cost_per_hour.items()))),
        weights_present=facts.weights_present,
    )


@settings(max_examples=25, deadline=None)
@given(facts=small_facts())
def test_the_same_facts_give_the_same_plan_in_any_order(facts: PlacementFacts) -> None:
    assert place(facts) == place(turned(facts))
