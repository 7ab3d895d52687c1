"""Placement problems for tests: a fleet to vary, and random ones that are small enough to try every placement."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    PoolFacts,
    Profile,
    StartTimes,
)
from dataplane.protocol.tiers import Tier

CAPACITY_MAX = 3
STARTS = (StartTimes.of_load(0.0), StartTimes(), StartTimes(spot_other_s=200.0))


@st.composite
def small_facts(draw: st.DrawFn, *, pools: bool = False) -> PlacementFacts:
    """At most four cells of at most three GPUs: few enough to try every placement."""
    models, regions, gpu_types = draw(
        st.sampled_from([("a", "rs", "H"), ("ab", "rs", "H"), ("a", "rs", "HL"), ("ab", "r", "HL")])
    )
    endpoints = [Endpoint(model=model, region=region) for model in models for region in regions]
    places = [RegionGpu(region=region, gpu_type=gpu_type) for region in regions for gpu_type in gpu_types]
    cells = [
        EndpointGpu(model=e.model, region=e.region, gpu_type=gpu_type) for e in endpoints for gpu_type in gpu_types
    ]
    windows = draw(st.integers(1, 2))
    amounts = st.sampled_from([0.0, 0.3, 40.0]) | st.integers(0, 50).map(lambda hundreds: 100.0 * hundreds)
    limits = {}
    for endpoint in endpoints:
        fewest = draw(st.integers(0, 2))
        limits[endpoint] = (fewest, draw(st.integers(fewest, 4)))
    facts = PlacementFacts(
        regions=tuple(regions),
        models=tuple(PlacementModel(name=name, tier=draw(st.sampled_from(list(Tier)))) for name in models),
        capacity={place: draw(st.integers(0, CAPACITY_MAX)) for place in places},
        profiles={
            ModelGpu(model=model, gpu_type=gpu_type): Profile(
                tokens_per_s=draw(st.sampled_from([700.0, 1300.0, 1900.0])),
                gpus=draw(st.integers(1, 2)),
                start=draw(st.sampled_from(STARTS)),
            )
            for model in models
            for gpu_type in gpu_types
        },
        present={cell: draw(st.integers(0, 2)) for cell in cells},
        demand={endpoint: tuple(draw(amounts) for _ in range(windows)) for endpoint in endpoints},
        limits=limits,
        gpu_cost_per_hour={gpu_type: draw(st.sampled_from([1.0, 2.0, 3.5])) for gpu_type in gpu_types},
        weights_present=frozenset(endpoint for endpoint in endpoints if draw(st.booleans())),
        spot={cell: draw(st.integers(0, 2)) for cell in cells if draw(st.booleans())},
        pins={endpoint: draw(st.integers(0, 4)) for endpoint in endpoints if draw(st.integers(0, 3)) == 0},
        unfit={cell: "too large" for cell in cells if draw(st.integers(0, 7)) == 0},
    )
    if not pools:
        return facts
    shares = st.sampled_from([0.02, 0.3, 0.79, 1.2])
    pool = PoolFacts(
        occupancy={cell: draw(shares) for cell in cells if draw(st.integers(0, 3))},
        weights_bytes=dict.fromkeys(models, 16),
        host_bytes_per_gpu={gpu_type: draw(st.sampled_from([0, 10, 16, 40])) for gpu_type in gpu_types},
        slot_gpus={place: draw(st.integers(1, 3)) for place in places if draw(st.booleans())},
        present={place: draw(st.integers(0, 2)) for place in places if draw(st.booleans())},
        pooled=frozenset(cell for cell in cells if draw(st.integers(0, 3)) == 0),
    )
    return replace(facts, pool=pool)


EXACT = PlacementSettings(gap=0.0)
WEST, EAST = Endpoint(model="a", region="us-west"), Endpoint(model="a", region="us-east")


def cell(model: str, region: str, gpu_type: str = "H800") -> EndpointGpu:
    return EndpointGpu(model=model, region=region, gpu_type=gpu_type)


def fleet(**changes: Any) -> PlacementFacts:
    """One model of 1,900 tokens/s on one GPU, two regions of 8 GPUs at 2 an hour, weights everywhere."""
    facts: dict[str, Any] = {
        "regions": ("us-west", "us-east"),
        "models": (PlacementModel(name="a"),),
        "capacity": {
            RegionGpu(region="us-west", gpu_type="H800"): 8,
            RegionGpu(region="us-east", gpu_type="H800"): 8,
        },
        "profiles": {ModelGpu(model="a", gpu_type="H800"): Profile(tokens_per_s=1900, gpus=1)},
        "present": {},
        "demand": {},
        "limits": {},
        "gpu_cost_per_hour": {"H800": 2.0},
        "weights_present": frozenset({WEST, EAST}),
    }
    return PlacementFacts(**{**facts, **changes})


def place(facts: PlacementFacts, how: PlacementSettings = EXACT) -> Placement:
    return choose_placement(facts, 7.0, how)


def after(placement: Placement) -> dict[tuple[str, str, str], int]:
    return {
        (entry.endpoint.model, entry.endpoint.region, entry.gpu_type): entry.after
        for entry in placement.entries
        if entry.after
    }
