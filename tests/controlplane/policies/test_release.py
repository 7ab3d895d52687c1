"""Release of deferred requests: below 60 % one, below 50 % two, a signal and endpoint (SageServe 6.2)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, InstanceFacts, QueueFacts, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_releases

SETTINGS = ReleaseSettings(below_one=0.6, below_two=0.5, aged_utilization_max=0.7, stale_s=5.0)


def instance(name: str, used: int, model: str = "tide", region: str = "east", **changes: Any) -> InstanceFacts:
    values: dict[str, Any] = {
        "instance_id": f"{name}-{model}-{region}",
        "node_id": name,
        "endpoint": Endpoint(model=model, region=region),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.5,
        "kv_used_bytes": used,
        "kv_capacity_bytes": 100,
        "remaining_tokens": 0,
    }
    return InstanceFacts(**(values | changes))


def queue(waiting: int, aged: int = 0, model: str = "tide") -> QueueFacts:
    return QueueFacts(model=model, waiting=waiting, aged=aged)


ROWS = [
    # name, instances, queues, releases as (model, region, count), the emptiest endpoint first
    ("49 %: two", [instance("a", 49)], [queue(9)], [("tide", "east", 2)]),
    ("50 %: one", [instance("a", 50)], [queue(9)], [("tide", "east", 1)]),
    ("59 %: one", [instance("a", 59)], [queue(9)], [("tide", "east", 1)]),
    ("60 %: none", [instance("a", 60)], [queue(9)], []),
    ("60 %, an old one: one", [instance("a", 60)], [queue(9, aged=3)], [("tide", "east", 1)]),
    ("69 %, an old one: one", [instance("a", 69)], [queue(9, aged=1)], [("tide", "east", 1)]),
    ("70 %, old ones: none", [instance("a", 70)], [queue(9, aged=9)], []),
    ("never more than wait", [instance("a", 0)], [queue(1)], [("tide", "east", 1)]),
    ("an empty queue", [instance("a", 0)], [queue(0)], []),
    ("no queue", [instance("a", 0)], [], []),
    ("another model's queue", [instance("a", 0)], [queue(5, model="x")], []),
    ("stale", [instance("a", 0, age_s=5.1)], [queue(9)], []),
    ("draining", [instance("a", 0, accepting=False)], [queue(9)], []),
    ("the stale one's room does not count", [instance("a", 0, age_s=9), instance("b", 65)], [queue(9)], []),
    (
        "over instances: (80 + 30) / 200 = 55 %",
        [instance("a", 80), instance("b", 30)],
        [queue(9)],
        [("tide", "east", 1)],
    ),
    (
        "sent counts: 40 + 10 = 50 %",
        [instance("a", 40, sent_tokens=5, kv_bytes_per_token=2)],
        [queue(9)],
        [("tide", "east", 1)],
    ),
    (
        "two endpoints share: 3 = 2 + 1, emptiest first",
        [instance("a", 30), instance("b", 10, region="west")],
        [queue(3)],
        [("tide", "west", 2), ("tide", "east", 1)],
    ),
    (
        "two endpoints share: 2 = 2 + 0",
        [instance("a", 30), instance("b", 10, region="west")],
        [queue(2)],
        [("tide", "west", 2)],
    ),
    (
        "one old one is let go once",
        [instance("a", 65), instance("b", 66, region="west")],
        [queue(9, aged=1)],
        [("tide", "east", 1)],
    ),
    (
        "each model has its queue",
        [instance("a", 10), instance("b", 20, model="x")],
        [queue(5), queue(1, model="x")],
        [("tide", "east", 2), ("x", "east", 1)],
    ),
]


@pytest.mark.parametrize(("instances", "queues", "releases"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_releases(
    instances: list[InstanceFacts], queues: list[QueueFacts], releases: list[tuple[str, str, int]]
) -> None:
    decided = choose_releases(ReleaseFacts(queues=tuple(queues), instances=tuple(instances)), 0.0, SETTINGS)
    assert [(r.endpoint.model, r.endpoint.region, r.count) for r in decided] == releases


MODELS = st.sampled_from(["tide", "x", "y"])
INSTANCES = st.lists(
    st.builds(
        instance,
        st.uuids().map(str),
        st.integers(0, 100),
        model=MODELS,
        region=st.sampled_from(["east", "west"]),
        age_s=st.floats(0, 10),
        accepting=st.booleans(),
    ),
    max_size=8,
)
QUEUES = st.lists(
    st.tuples(MODELS, st.integers(0, 4), st.integers(0, 4)), max_size=3, unique_by=lambda each: each[0]
).map(lambda rows: [queue(waiting, min(waiting, aged), model) for model, waiting, aged in rows])


@given(instances=INSTANCES, queues=QUEUES)
def test_never_more_than_waits_nor_than_there_is_room_for(
    instances: list[InstanceFacts], queues: list[QueueFacts]
) -> None:
    decided = choose_releases(ReleaseFacts(queues=tuple(queues), instances=tuple(instances)), 0.0, SETTINGS)
    for asked in queues:
        assert sum(r.count for r in decided if r.endpoint.model == asked.model) <= asked.waiting
    assert len({r.endpoint for r in decided}) == len(decided)
    for release in decided:
        assert 1 <= release.count <= 2
        fresh = [i for i in instances if i.endpoint == release.endpoint and i.accepting and i.age_s <= 5]
        used = sum(i.kv_used_bytes for i in fresh) / (100 * len(fresh))
        assert used < (0.5 if release.count == 2 else 0.7)
