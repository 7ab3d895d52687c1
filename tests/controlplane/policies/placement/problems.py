"""Placement problems for tests: a fleet to vary, and random ones that are small enough to try every placement."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
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
from controlplane.policies.placement.grid import Answer
from dataplane.protocol.tiers import Tier

CAPACITY_MAX = 3
STARTS = (StartTimes.of_load(0.0), StartTimes(), StartTimes(donated_other_s=200.0))


@st.composite
def small_facts(draw: st.DrawFn, *, pools: bool | None = False, wide: bool = False) -> PlacementFacts:
    """At most four cells of at most three GPUs: few enough to try every placement. `wide`: up to 18 cells, some without
    a profile or limits. `pools` None: either way.
    """
    shapes = [("a", "rs", "H"), ("ab", "rs", "H"), ("a", "rs", "HL"), ("ab", "r", "HL")]
    if wide:
        shapes = [("abc"[:models], "rst"[:regions], "HL") for models in (1, 2, 3) for regions in (1, 2, 3)]
    models, regions, gpu_types = draw(st.sampled_from(shapes))
    endpoints = [Endpoint(model=model, region=region) for model in models for region in regions]
    places = [RegionGpu(region=region, gpu_type=gpu_type) for region in regions for gpu_type in gpu_types]
    pairs = [ModelGpu(model=model, gpu_type=gpu_type) for model in models for gpu_type in gpu_types]
    pairs = [pair for pair in pairs if not wide or draw(st.integers(0, 4))]
    cells = [
        EndpointGpu(model=pair.model, region=region, gpu_type=pair.gpu_type) for region in regions for pair in pairs
    ]
    windows = draw(st.integers(1, 2))
    amounts = st.sampled_from([0.0, 0.3, 40.0]) | st.integers(0, 50).map(lambda hundreds: 100.0 * hundreds)
    limits = {}
    for endpoint in [each for each in endpoints if not wide or draw(st.booleans())]:
        fewest = draw(st.integers(0, 2))
        limits[endpoint] = (fewest, draw(st.integers(fewest, 4)))
    facts = PlacementFacts(
        regions=tuple(regions),
        models=tuple(PlacementModel(name=name, tier=draw(st.sampled_from(list(Tier)))) for name in models),
        capacity={place: draw(st.integers(0, 6 if wide else CAPACITY_MAX)) for place in places},
        profiles={
            pair: Profile(
                tokens_per_s=draw(st.sampled_from([700.0, 1300.0, 1900.0])),
                gpus=draw(st.integers(1, 2)),
                start=draw(st.sampled_from(STARTS)),
            )
            for pair in pairs
        },
        present={cell: draw(st.integers(0, 2)) for cell in cells},
        demand={endpoint: tuple(draw(amounts) for _ in range(windows)) for endpoint in endpoints},
        limits=limits,
        gpu_cost_per_hour={gpu_type: draw(st.sampled_from([1.0, 2.0, 3.5])) for gpu_type in gpu_types},
        weights_present=frozenset(endpoint for endpoint in endpoints if draw(st.booleans())),
        donated={cell: draw(st.integers(0, 2)) for cell in cells if draw(st.booleans())},
        overrides={endpoint: draw(st.integers(0, 4)) for endpoint in endpoints if draw(st.integers(0, 3)) == 0},
        unfit={cell: "too large" for cell in cells if draw(st.integers(0, 7)) == 0},
    )
    if not (draw(st.booleans()) if pools is None else pools):
        return facts
    shares = st.sampled_from([0.02, 0.3, 0.79, 1.2])
    keys = [
        PoolKey(region=place.region, gpu_type=place.gpu_type, worker_gpus=gpus) for place in places for gpus in (1, 2)
    ]
    pool = PoolFacts(
        occupancy={cell: draw(shares) for cell in cells if draw(st.integers(0, 3))},
        weights_bytes=dict.fromkeys(models, 16),
        host_bytes_per_gpu={gpu_type: draw(st.sampled_from([0, 10, 16, 40])) for gpu_type in gpu_types},
        worker_gpus={pair: profile.gpus for pair, profile in facts.profiles.items() if profile.gpus > 1},
        slot_gpus={key: key.worker_gpus * draw(st.integers(1, 3)) for key in keys if draw(st.booleans())},
        most={key: draw(st.integers(0, CAPACITY_MAX)) for key in keys if draw(st.integers(0, 3)) == 0},
        present={key: draw(st.integers(0, 2)) for key in keys if draw(st.booleans())},
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


def answer_of(placement: Placement) -> Answer:
    """What a placement decides, as the cost function takes it."""
    return Answer(
        counts={entry.key: entry.after for entry in placement.entries},
        pooled=frozenset(each.key for each in placement.pooled),
        pool_gpus={pool.key: pool.after for pool in placement.pools},
    )


def turned(facts: PlacementFacts) -> PlacementFacts:
    """The same facts in the opposite order."""
    values = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value[::-1]
        for name, value in vars(facts).items()
        if isinstance(value, dict | tuple)
    }
    pool = facts.pool and replace(facts.pool, occupancy=dict(reversed(list(facts.pool.occupancy.items()))))
    return replace(facts, **values, pool=pool)


def after(placement: Placement) -> dict[tuple[str, str, str], int]:
    return {
        (entry.endpoint.model, entry.endpoint.region, entry.gpu_type): entry.after
        for entry in placement.entries
        if entry.after
    }
