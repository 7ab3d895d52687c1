"""Release of deferred requests: below 60 % one, below 50 % two, a signal and endpoint (SageServe 6.2); whose they are;
and backoff after an overload.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Backoff, Endpoint, GroupFacts, InstanceFacts, ReleaseFacts, SlotId
from controlplane.policies.release import ReleaseSettings, choose_backoff, choose_releases
from dataplane.protocol.tiers import InstanceKind

SETTINGS = ReleaseSettings()
HOUR_S = 3600.0
OLD_S = 11 * HOUR_S


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


def group(waiting: int, batch: int = 1, model: str = "tide", tenant: str = "a", **changes: Any) -> GroupFacts:
    values: dict[str, Any] = {"age_s": HOUR_S, "left_s": 23 * HOUR_S}
    return GroupFacts(batch=batch, tenant=tenant, model=model, waiting=waiting, **(values | changes))


def old(waiting: int, **changes: Any) -> GroupFacts:
    return group(waiting, **({"age_s": OLD_S, "left_s": 24 * HOUR_S - OLD_S} | changes))


def facts(instances: list[InstanceFacts], groups: list[GroupFacts], **changes: Any) -> ReleaseFacts:
    return ReleaseFacts(instances=tuple(instances), groups=tuple(groups), **changes)


def by_endpoint(given: ReleaseFacts, now_s: float = 0.0) -> list[tuple[str, str, int]]:
    counts: Counter[tuple[str, str]] = Counter()
    for release in choose_releases(given, now_s, SETTINGS):
        counts[release.endpoint.model, release.endpoint.region] += release.count
    return [(*endpoint, count) for endpoint, count in counts.items()]


ROWS = [
    # name, instances, groups, releases as (model, region, count), the emptiest endpoint first
    ("49 %: two", [instance("a", 49)], [group(9)], [("tide", "east", 2)]),
    ("50 %: one", [instance("a", 50)], [group(9)], [("tide", "east", 1)]),
    ("59 %: one", [instance("a", 59)], [group(9)], [("tide", "east", 1)]),
    ("60 %: none", [instance("a", 60)], [group(9)], []),
    ("60 %, an old one: one", [instance("a", 60)], [group(9), old(3, batch=2)], [("tide", "east", 1)]),
    ("69 %, an old one: one", [instance("a", 69)], [old(1)], [("tide", "east", 1)]),
    ("69 %, one near its deadline: one", [instance("a", 69)], [group(1, left_s=1000.0)], [("tide", "east", 1)]),
    ("70 %, old ones: none", [instance("a", 70)], [old(9)], []),
    ("never more than wait", [instance("a", 0)], [group(1)], [("tide", "east", 1)]),
    ("an empty queue", [instance("a", 0)], [group(0)], []),
    ("no queue", [instance("a", 0)], [], []),
    ("another model's queue", [instance("a", 0)], [group(5, model="x")], []),
    ("stale", [instance("a", 0, age_s=5.1)], [group(9)], []),
    ("draining", [instance("a", 0, accepting=False)], [group(9)], []),
    ("for interactive requests only", [instance("a", 0, kind=InstanceKind.IW)], [group(9)], []),
    ("a stale one's capacity does not count", [instance("a", 0, age_s=9), instance("b", 65)], [group(9)], []),
    (
        "over instances: (80 + 30) / 200 = 55 %",
        [instance("a", 80), instance("b", 30)],
        [group(9)],
        [("tide", "east", 1)],
    ),
    (
        "sent counts: 40 + 10 = 50 %",
        [instance("a", 40, sent_tokens=5, kv_bytes_per_token=2)],
        [group(9)],
        [("tide", "east", 1)],
    ),
    (
        "two endpoints share: 3 = 2 + 1, emptiest first",
        [instance("a", 30), instance("b", 10, region="west")],
        [group(3)],
        [("tide", "west", 2), ("tide", "east", 1)],
    ),
    (
        "two endpoints share: 2 = 2 + 0",
        [instance("a", 30), instance("b", 10, region="west")],
        [group(2)],
        [("tide", "west", 2)],
    ),
    (
        "one old one is released once",
        [instance("a", 65), instance("b", 66, region="west")],
        [group(9), old(1, batch=2)],
        [("tide", "east", 1)],
    ),
    (
        "each model has its queue",
        [instance("a", 10), instance("b", 20, model="x")],
        [group(5), group(1, model="x")],
        [("tide", "east", 2), ("x", "east", 1)],
    ),
]


@pytest.mark.parametrize(("instances", "groups", "releases"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_releases_follow_capacity(
    instances: list[InstanceFacts], groups: list[GroupFacts], releases: list[tuple[str, str, int]]
) -> None:
    assert by_endpoint(facts(instances, groups)) == releases


def served(groups: list[GroupFacts], looks: int, utilization: int = 55) -> list[tuple[str, int]]:
    """(tenant, batch) of one request a look, for so many looks."""
    last_tenants: dict[str, str] = {}
    order = []
    for _ in range(looks):
        given = facts([instance("a", utilization)], groups, last_tenants=last_tenants)
        [release] = choose_releases(given, 0.0, SETTINGS)
        last_tenants = {"tide": release.tenant}
        order.append((release.tenant, release.batch))
        groups = [
            msgspec.structs.replace(each, waiting=each.waiting - (each.batch == release.batch)) for each in groups
        ]
    return order


def test_tenants_rotate_and_each_has_its_nearest_deadline_first() -> None:
    groups = [
        group(1_000_000, batch=1, tenant="a", left_s=20 * HOUR_S),
        group(2, batch=2, tenant="b", left_s=23 * HOUR_S),
        group(1, batch=3, tenant="b", left_s=22 * HOUR_S),
        group(1, batch=4, tenant="c"),
    ]
    assert served(groups, 8) == [("a", 1), ("b", 3), ("c", 4), ("a", 1), ("b", 2), ("a", 1), ("b", 2), ("a", 1)]


def test_urgent_requests_are_first_and_their_tenants_rotate_too() -> None:
    groups = [group(9, batch=1, tenant="a"), old(2, batch=2, tenant="b"), old(1, batch=3, tenant="c")]
    assert served(groups, 5) == [("b", 2), ("c", 3), ("b", 2), ("a", 1), ("a", 1)]


def test_a_short_window_is_urgent_in_its_last_quarter() -> None:
    full = [instance("a", 65)]
    assert by_endpoint(facts(full, [group(1, age_s=2600.0, left_s=1000.0)])) == []
    assert by_endpoint(facts(full, [group(1, age_s=2800.0, left_s=800.0)])) == [("tide", "east", 1)]


def test_models_of_one_slot_have_time_slices_so_that_it_switches_less() -> None:
    pool = [instance("p", 10, model=name) for name in ("x", "y", "z")]
    groups = [group(99, batch=n, model=name) for n, name in enumerate(("x", "y", "z"))]
    looks = [by_endpoint(facts(pool, groups), now_s=s) for s in (0.0, 29.0, 30.0, 60.0, 90.0)]
    assert [[model for model, _, _ in look] for look in looks] == [["x"], ["x"], ["y"], ["z"], ["x"]]
    assert by_endpoint(facts(pool, groups[1:2])) == [("y", "east", 2)], "what has nothing waiting gets no time slice"
    urgent = [groups[0], old(1, batch=7, model="z")]
    assert by_endpoint(facts(pool, urgent)) == [("z", "east", 1), ("x", "east", 1)], (
        "urgent requests need no time slice"
    )
    apart = [instance("p", 10, model="x"), instance("p", 10, model="y", slot=1)]
    assert len(by_endpoint(facts(apart, groups))) == 2


def test_models_of_one_slot_share_its_capacity() -> None:
    names = [f"m{n:02}" for n in range(20)]
    pool = [instance("p", 10, model=name) for name in names]
    waiting = [group(99, batch=n, model=name) for n, name in enumerate(names)]
    urgent = [old(99, batch=n, model=name) for n, name in enumerate(names)]
    for groups in (waiting, urgent):
        decided = choose_releases(facts(pool, groups), 0.0, SETTINGS)
        assert [(r.slot, r.count) for r in decided] == [(SlotId(node_id="p", number=0), 2)]
    full = [msgspec.structs.replace(each, kv_used_bytes=65) for each in pool]
    served = {choose_releases(facts(full, urgent), 30.0 * n, SETTINGS)[0].endpoint.model for n in range(20)}
    assert served == set(names), "in rotation"


def test_an_endpoint_in_two_slots_uses_both_and_leaves_the_rest_to_others() -> None:
    both = [instance("p", 0, model="x"), instance("p", 0, model="x", slot=1)]
    groups = [group(9, batch=1, model="x"), old(9, batch=2, model="y")]
    decided = choose_releases(facts([*both, instance("p", 30, model="y")], groups), 30.0, SETTINGS)
    assert [(r.endpoint.model, r.slot.number, r.count) for r in decided if r.slot] == [("y", 0, 2), ("x", 1, 2)]


def test_an_endpoint_uses_no_slot_in_the_time_slice_of_another_model() -> None:
    fleet = [instance("p", 52, model="x"), instance("p", 52, model="x", slot=1), instance("p", 55, model="y")]
    groups = [group(9, batch=1, model="x"), group(9, batch=2, model="y")]
    looks = [choose_releases(facts(fleet, groups), now_s, SETTINGS) for now_s in (0.0, 30.0)]
    assert [[(r.endpoint.model, r.slot.number) for r in look if r.slot] for look in looks] == [
        [("x", 0)],
        [("x", 1), ("y", 0)],
    ]


EAST = Endpoint(model="tide", region="east")


def pauses(
    before: Backoff, used: int, now_s: float, *, refused: bool = False, load: float = 0.5, capacity: int = 100
) -> Backoff:
    given = facts([instance("a", used, load=load, kv_capacity_bytes=capacity)], [group(9)], backoffs={EAST: before})
    return choose_backoff(given, frozenset({EAST} if refused else ()), now_s, SETTINGS)[EAST]


def test_a_pausing_endpoint_gets_nothing() -> None:
    paused = {EAST: Backoff(pause_s=2.0, until_s=10.0)}
    assert by_endpoint(facts([instance("a", 0)], [old(9)], backoffs=paused), now_s=9.9) == []
    assert by_endpoint(facts([instance("a", 0)], [group(9)], backoffs=paused), now_s=10.0) == [("tide", "east", 2)]


@pytest.mark.parametrize(
    ("overload", "used"),
    [({"refused": True}, 30), ({"load": 1.1}, 30), ({}, 55)],
    ids=["a refusal", "decodes behind", "utilization rises"],
)
def test_an_overload_pauses_an_endpoint_and_each_further_one_for_longer(overload: dict[str, Any], used: int) -> None:
    calm = Backoff(utilization=0.3)
    backoff, now_s, waits = calm, 0.0, []
    for _ in range(8):
        backoff = pauses(msgspec.structs.replace(backoff, utilization=0.3), used, now_s, **overload)
        waits.append(backoff.until_s - now_s)
        now_s = backoff.until_s
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    for expected in (30, 15, 7.5, 3.75, 1.875, 0.9375, 0):
        assert pauses(backoff, 30, now_s).pause_s == backoff.pause_s, "quiet, but not for long enough"
        now_s += backoff.pause_s
        backoff = pauses(backoff, 30, now_s)
        assert (backoff.pause_s, backoff.until_s <= now_s) == (expected, True)


def test_what_is_no_overload() -> None:
    calm = Backoff(utilization=0.3)
    for used, load in ((38, 0.5), (49, 0.5), (30, 1.0)):
        assert pauses(calm, used, 0.0, load=load).pause_s == 0, (used, load)
    assert pauses(Backoff(), 69, 0.0).pause_s == 0, "the first release knows of no rise"


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
GROUPS = st.lists(
    st.builds(
        group,
        st.integers(0, 4),
        batch=st.integers(1, 4),
        model=MODELS,
        tenant=st.sampled_from("abc"),
        age_s=st.floats(0, 90_000),
        left_s=st.floats(0, 90_000),
    ),
    max_size=6,
    unique_by=lambda each: (each.batch, each.model),
)


@given(instances=INSTANCES, groups=GROUPS, now_s=st.floats(0, 100))
def test_never_more_than_waits_nor_than_there_is_capacity_for(
    instances: list[InstanceFacts], groups: list[GroupFacts], now_s: float
) -> None:
    decided = choose_releases(facts(instances, groups), now_s, SETTINGS)
    waiting = {(each.batch, each.model): each.waiting for each in groups}
    endpoints: Counter[Endpoint] = Counter()
    taken: Counter[tuple[int, str]] = Counter()
    for release in decided:
        assert release.count >= 1
        endpoints[release.endpoint] += release.count
        taken[release.batch, release.endpoint.model] += release.count
    assert all(count <= waiting[group] for group, count in taken.items())
    assert len({(r.endpoint, r.batch, r.slot) for r in decided}) == len(decided)
    slots = Counter({r.slot: 0 for r in decided})
    for release in decided:
        slots[release.slot] += release.count
    assert all(count <= 2 for count in slots.values())
    for endpoint, count in endpoints.items():
        fresh = [i for i in instances if i.endpoint == endpoint and i.accepting and i.age_s <= 5]
        used = sum(i.kv_used_bytes for i in fresh) / (100 * len(fresh))
        assert count <= 2
        assert used < (0.5 if count == 2 else 0.7)
