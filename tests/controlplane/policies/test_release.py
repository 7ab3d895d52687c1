"""Release of deferred requests: as many as there is room for, within a window that is cut at each sign of trouble; and
whose they are.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, GroupFacts, InstanceFacts, ReleaseFacts, Window
from controlplane.policies.release import ReleaseSettings, choose_releases, choose_windows, has_room
from dataplane.protocol.tiers import InstanceKind

SETTINGS = ReleaseSettings()
HOUR_S = 3600.0
OLD_S = 11 * HOUR_S
EAST = Endpoint(model="tide", region="east")
WIDE = Window(requests=1e6)


def instance(
    name: str, kv_used_bytes: int = 0, model: str = "tide", region: str = "east", **changes: Any
) -> InstanceFacts:
    """Its KV memory holds 1,000 tokens, of a byte each, and a batch 100 sequences."""
    values: dict[str, Any] = {
        "instance_id": f"{name}-{model}-{region}",
        "node_id": name,
        "endpoint": Endpoint(model=model, region=region),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.5,
        "kv_used_bytes": kv_used_bytes,
        "kv_capacity_bytes": 1000,
        "kv_bytes_per_token": 1,
        "remaining_tokens": 0,
        "batch_max": 100,
    }
    return InstanceFacts(**(values | changes))


def group(waiting: int = 10_000, batch: int = 1, model: str = "tide", tenant: str = "a", **changes: Any) -> GroupFacts:
    values: dict[str, Any] = {"age_s": HOUR_S, "left_s": 23 * HOUR_S, "left": waiting, "tokens": 10.0}
    return GroupFacts(batch=batch, tenant=tenant, model=model, waiting=waiting, **(values | changes))


def old(waiting: int = 10_000, **changes: Any) -> GroupFacts:
    return group(waiting, **({"age_s": OLD_S, "left_s": 24 * HOUR_S - OLD_S} | changes))


def facts(instances: list[InstanceFacts], groups: list[GroupFacts], **changes: Any) -> ReleaseFacts:
    """By default, in windows that limit nothing."""
    windows = {"windows": {each.endpoint: WIDE for each in instances}}
    return ReleaseFacts(instances=tuple(instances), groups=tuple(groups), **(windows | changes))


def by_endpoint(given: ReleaseFacts, now_s: float = 0.0, **changes: Any) -> dict[tuple[str, str], int]:
    settings = ReleaseSettings(**changes)
    endpoints = (release.endpoint for release in choose_releases(given, now_s, settings))
    return dict(Counter((endpoint.model, endpoint.region) for endpoint in endpoints))


def count(given: ReleaseFacts, **changes: Any) -> int:
    return sum(by_endpoint(given, **changes).values())


ROWS = [
    # name, instances, groups, how many are released
    ("(600 - 0) / 10", [instance("a")], [group()], 60),
    ("(600 - 550) / 10", [instance("a", 550)], [group()], 5),
    ("at the threshold", [instance("a", 600)], [group()], 0),
    ("urgent ones up to 70 %", [instance("a", 600)], [group(), old(batch=2)], 10),
    ("near its deadline", [instance("a", 600)], [group(left_s=1000.0)], 10),
    ("no further", [instance("a", 700)], [old()], 0),
    ("below the threshold one that fits", [instance("a", 590)], [group(tokens=400.0)], 1),
    ("none that does not fit", [instance("a", 590)], [group(tokens=420.0)], 0),
    ("a smaller one that fits", [instance("a", 590)], [group(tokens=420.0), group(batch=2, tenant="b")], 1),
    ("of unknown size: a quarter of the memory", [instance("a")], [group(tokens=None)], 3),
    ("places: a batch and a quarter of it", [instance("a", batch_max=8)], [group(tokens=1.0)], 10),
    ("less what is there", [instance("a", batch_max=8, requests=7)], [group(tokens=1.0)], 3),
    ("places of an older node", [instance("a", batch_max=None)], [group(tokens=1.0)], 40),
    ("sent counts", [instance("a", 500, sent_tokens=50)], [group()], 5),
    (
        "what is deferred there counts in full",
        [instance("a", 100, deferred_requests=4, deferred_tokens=400.0)],
        [group()],
        10,
    ),
    ("never more than wait", [instance("a")], [group(7)], 7),
    ("an empty queue", [instance("a")], [group(0)], 0),
    ("no queue", [instance("a")], [], 0),
    ("another model's queue", [instance("a")], [group(model="x")], 0),
    ("stale", [instance("a", age_s=5.1)], [group()], 0),
    ("draining", [instance("a", accepting=False)], [group()], 0),
    ("for interactive requests only", [instance("a", kind=InstanceKind.IW)], [group()], 0),
    ("a full one has no part in it", [instance("a", 1000), instance("b", 550)], [group()], 5),
]


@pytest.mark.parametrize(("instances", "groups", "released"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_as_many_as_there_is_room_for(instances: list[InstanceFacts], groups: list[GroupFacts], released: int) -> None:
    assert count(facts(instances, groups)) == released


def test_each_instance_gets_what_it_has_room_for() -> None:
    given = facts([instance("a"), instance("b", 300), instance("c", 590)], [group()])
    counts = Counter(release.instance_id for release in choose_releases(given, 0.0, ReleaseSettings()))
    assert counts == {"a-tide-east": 60, "b-tide-east": 30, "c-tide-east": 1}


def test_endpoints_take_turns() -> None:
    two = [instance("a"), instance("b"), instance("c", region="west")]
    assert by_endpoint(facts(two, [group(9)])) == {("tide", "east"): 6, ("tide", "west"): 3}
    assert by_endpoint(facts(two, [group()])) == {("tide", "east"): 120, ("tide", "west"): 60}


def served(groups: list[GroupFacts], looks: int) -> list[tuple[str, int]]:
    """(tenant, batch) of one request a look, for so many looks."""
    last_tenants: dict[str, str] = {}
    order = []
    for _ in range(looks):
        given = facts([instance("a", 599)], groups, last_tenants=last_tenants)
        [release] = choose_releases(given, 0.0, ReleaseSettings(urgent_utilization_max=0.6))
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
    order = [("a", 1), ("b", 3), ("c", 4), ("a", 1), ("b", 2), ("a", 1), ("b", 2), ("a", 1)]
    assert served(groups, 8) == order
    at_once = choose_releases(facts([instance("a", 520)], groups), 0.0, SETTINGS)
    assert [(each.tenant, each.batch) for each in at_once] == order


@pytest.mark.parametrize("tenants", ["ab", "abc"])
@pytest.mark.parametrize(("instances", "count_max"), [(1, 10), (1, 31), (4, 33), (4, 70), (20, 75)])
def test_tenants_have_equal_shares_of_what_a_caller_can_send(instances: int, count_max: int, tenants: str) -> None:
    """However many that is: it continues with the tenant after the one that was released last."""
    groups = [group(batch=number, tenant=tenant) for number, tenant in enumerate(tenants)]
    fleet = [instance(str(number)) for number in range(instances)]
    released: list[str] = []
    for _ in range(10):
        given = facts(fleet, groups, last_tenants={"tide": released[-1]} if released else {}, count_max=count_max)
        released += [each.tenant for each in choose_releases(given, 0.0, SETTINGS)]
    assert len(released) == 10 * count_max
    assert max(Counter(released).values()) - min(Counter(released).values()) <= 1


def test_urgent_requests_are_first_and_their_tenants_rotate_too() -> None:
    groups = [group(9, batch=1, tenant="a"), old(2, batch=2, tenant="b"), old(1, batch=3, tenant="c")]
    assert served(groups, 5) == [("b", 2), ("c", 3), ("b", 2), ("a", 1), ("a", 1)]


@pytest.mark.parametrize("count_max", [10, 20, 60, 200])
def test_urgent_requests_are_first_where_a_caller_can_send_few(count_max: int) -> None:
    """One endpoint with urgent requests, for 70 of which it has room, and nine with others."""
    fleet = [instance("urgent", model="urgent"), *(instance(str(n), model=str(n)) for n in range(9))]
    groups = [old(batch=1, model="urgent"), *(group(batch=2 + n, model=str(n)) for n in range(9))]
    released = choose_releases(facts(fleet, groups, count_max=count_max), 0.0, SETTINGS)
    assert len(released) == count_max
    assert [each.urgent for each in released[:70]] == [True] * min(count_max, 70)


def test_models_of_one_slot_have_time_slices_so_that_it_switches_less() -> None:
    pool = [instance("p", model=name) for name in ("x", "y", "z")]
    groups = [group(batch=n, model=name) for n, name in enumerate(("x", "y", "z"))]
    looks = [by_endpoint(facts(pool, groups), now_s=s) for s in (0.0, 29.0, 30.0, 60.0, 90.0)]
    assert [[model for model, _ in look] for look in looks] == [["x"], ["x"], ["y"], ["z"], ["x"]]
    assert by_endpoint(facts(pool, groups[1:2])) == {("y", "east"): 60}, "what has nothing waiting gets no time slice"
    urgent = [groups[0], old(10, batch=7, model="z")]
    assert by_endpoint(facts(pool, urgent)) == {("z", "east"): 10, ("x", "east"): 50}, "urgent ones need no time slice"
    apart = [instance("p", model="x"), instance("p", model="y", slot=1)]
    assert len(by_endpoint(facts(apart, groups))) == 2


def test_models_of_one_slot_share_its_memory() -> None:
    pool = [instance("p", 100, model="x", deferred_tokens=200.0), instance("p", 100, model="y")]
    assert count(facts(pool, [group(batch=1, model="x"), old(batch=2, model="y")])) == (700 - 300) / 10
    assert count(facts(pool, [old(batch=1, model="x"), old(batch=2, model="y")])) == (700 - 300) / 10


def test_an_endpoint_uses_no_slot_in_the_time_slice_of_another_model() -> None:
    fleet = [instance("p", model="x"), instance("p", model="x", slot=1), instance("p", model="y")]
    groups = [group(batch=1, model="x"), group(batch=2, model="y")]
    looks = [by_endpoint(facts(fleet, groups), now_s) for now_s in (0.0, 30.0)]
    assert looks == [{("x", "east"): 120}, {("x", "east"): 60, ("y", "east"): 60}]


def test_a_window_limits_what_all_dispatchers_have_in_flight_but_not_what_is_urgent() -> None:
    limited = {"windows": {EAST: Window(requests=12.5)}, "in_flight": {EAST: 5}}
    assert count(facts([instance("a")], [group()], **limited)) == 7
    assert count(facts([instance("a")], [group(), old(20, batch=2)], **limited)) == 20
    assert count(facts([instance("a")], [old()], **limited)) == 70
    assert count(facts([instance("a")], [group()], windows={})) == 0, "it has not been stepped"


def step(
    window: Window,
    *instances: InstanceFacts,
    at_s: float,
    in_flight: int = 0,
    refused: bool = False,
    interactive: bool = False,
) -> Window:
    given = facts(
        list(instances),
        [group()],
        windows={EAST: window},
        in_flight={EAST: in_flight},
        interactive=frozenset({EAST} if interactive else ()),
    )
    return choose_windows(given, frozenset({EAST} if refused else ()), at_s, SETTINGS)[EAST]


CALM = Window(requests=40.0, stepped_s=100.0, utilization=0.3)


def test_a_new_window_has_the_signals_of_the_paper() -> None:
    for used, signals in ((0, 2), (499, 2), (500, 1), (599, 1), (600, 0)):
        assert step(Window(), instance("a", used), at_s=0.0).requests == signals
        assert step(CALM, instance("a", used), at_s=100.0 + 60.0).requests == signals, "after a rest"


@pytest.mark.parametrize("instances", [1, 4, 16])
def test_a_window_fills_idle_instances_in_seconds_however_many_they_are(instances: int) -> None:
    fleet = [instance(str(n)) for n in range(instances)]
    window, at_s = Window(), 100.0
    while window.requests < 100 * instances:
        at_s += 0.25
        window = step(window, *fleet, at_s=at_s, in_flight=int(window.requests))
    assert at_s <= 105
    for _ in range(9):
        at_s += 1.0
        window = step(window, *fleet, at_s=at_s, in_flight=int(window.requests))
    assert window.requests == 125 * instances, "what they run and queue, no more"


def test_a_window_grows_with_time_however_many_dispatchers_step_it_and_not_while_little_of_it_is_used() -> None:
    once = step(CALM, instance("a"), at_s=100.5, in_flight=40)
    often = CALM
    for n in range(1, 6):
        often = step(often, instance("a"), at_s=100 + n / 10, in_flight=40)
    assert once.requests == pytest.approx(often.requests) == pytest.approx(40 + 16)
    assert step(once, instance("a"), at_s=99.0, in_flight=60).requests == once.requests, "another one's clock is behind"
    assert step(CALM, instance("a"), at_s=100.5, in_flight=19).requests == 40


TROUBLE: list[tuple[str, dict[str, Any], bool]] = [
    ("a refusal", {}, True),
    ("decodes behind", {"load": 1.1}, False),
    ("a late first token, IW-F", {"prefill_urgent_wait_s": 0.6, "prefill_token_s": 0.001}, False),
    ("a late first token, IW-N", {"prefill_wait_s": 31.0, "prefill_token_s": 0.001}, False),
    (
        "one with what was sent",
        {"prefill_urgent_wait_s": 0.4, "prefill_token_s": 0.001, "sent_input_tokens": 200},
        False,
    ),
    ("utilization rises", {"kv_used_bytes": 550}, False),
]


@pytest.mark.parametrize(("changes", "refused"), [r[1:] for r in TROUBLE], ids=[r[0] for r in TROUBLE])
def test_each_sign_of_trouble_cuts_the_window_and_holds_it(changes: dict[str, Any], refused: bool) -> None:
    troubled = instance("a", **({"kv_used_bytes": 300, "deferred_requests": 30} | changes))
    cut = step(CALM, troubled, at_s=100.2, in_flight=30, refused=refused, interactive=True)
    assert (cut.requests, cut.cut_s) == (15, 100.2), "half of what was in flight"
    held = step(cut, troubled, at_s=100.3, in_flight=30, refused=refused, interactive=True)
    assert (held.requests, held.cut_s) == (15, 100.2), "the reports cannot show yet what the cut has changed"
    given = facts([instance("a")], [group(), old(batch=2)], windows={EAST: held})
    assert (count(given, now_s=102.1), count(given, now_s=102.3) > 0) == (0, True)
    if "kv_used_bytes" not in changes:
        again = step(held, troubled, at_s=102.3, in_flight=15, refused=refused, interactive=True)
        assert (again.requests, again.cut_s) == (7.5, 102.3), "it goes on"
    calm = step(held, instance("a", 300), at_s=102.3, in_flight=14)
    assert calm.requests == 15 + 2.0, "a second's growth, slower than before"
    later = step(msgspec.structs.replace(calm, stepped_s=162.0), instance("a", 300), at_s=163.0, in_flight=17)
    assert later.requests == 17 + 32.0


def test_what_is_no_trouble() -> None:
    for changes in (
        {"kv_used_bytes": 380},
        {"kv_used_bytes": 300, "load": 1.0},
        {"kv_used_bytes": 300, "prefill_urgent_wait_s": 0.5, "prefill_token_s": 0.001},
        {"kv_used_bytes": 300, "deferred_tokens": 400.0, "deferred_requests": 30},
        {"kv_used_bytes": 300, "prefill_urgent_wait_s": 60.0, "prefill_token_s": 0.001},  # nobody would wait for it
    ):
        assert step(CALM, instance("a", **changes), at_s=100.0, in_flight=30).cut_s < 0, changes  # type: ignore[arg-type]
    elsewhere = step(CALM, instance("a", 550), at_s=100.0, in_flight=30)
    assert elsewhere.cut_s < 0, "other dispatchers have 30 in flight of 10 tokens each"
    assert step(Window(), instance("a", 690), at_s=0.0).cut_s < 0, "the first step knows of no rise"


MODELS = st.sampled_from(["tide", "x", "y"])
INSTANCES = st.lists(
    st.builds(
        instance,
        st.uuids().map(str) | st.just("shared"),
        st.integers(0, 1000),
        model=MODELS,
        region=st.sampled_from(["east", "west"]),
        age_s=st.floats(0, 10),
        accepting=st.booleans(),
        requests=st.integers(0, 20),
        batch_max=st.none() | st.integers(0, 20),
        deferred_requests=st.integers(0, 10),
        deferred_tokens=st.floats(0, 500),
    ),
    max_size=8,
    unique_by=lambda each: each.instance_id,
)
GROUPS = st.lists(
    st.builds(
        group,
        st.integers(0, 40),
        batch=st.integers(1, 4),
        model=MODELS,
        tenant=st.sampled_from("abc"),
        age_s=st.floats(0, 90_000),
        left_s=st.floats(0, 90_000),
        tokens=st.none() | st.floats(1, 1500),
    ),
    max_size=6,
    unique_by=lambda each: (each.batch, each.model),
)


@given(instances=INSTANCES, groups=GROUPS, now_s=st.floats(0, 100), window=st.floats(0, 100))
def test_never_more_than_waits_nor_than_fits(
    instances: list[InstanceFacts], groups: list[GroupFacts], now_s: float, window: float
) -> None:
    windows = {each.endpoint: Window(requests=window) for each in instances}
    in_flight = Counter({each.endpoint: each.deferred_requests for each in instances})
    decided = choose_releases(facts(instances, groups, windows=windows, in_flight=in_flight), now_s, SETTINGS)
    waiting = {(each.batch, each.model): each for each in groups}
    taken: Counter[tuple[int, str]] = Counter()
    endpoints: Counter[Endpoint] = Counter()
    for release in decided:
        taken[release.batch, release.endpoint.model] += 1
        endpoints[release.endpoint] += not release.urgent
    assert all(count <= waiting[key].waiting for key, count in taken.items())
    assert all(count + in_flight[endpoint] <= max(window, in_flight[endpoint]) for endpoint, count in endpoints.items())
    for endpoint in {release.endpoint for release in decided}:
        fresh = [one for one in instances if one.endpoint == endpoint and one.accepting and one.age_s <= 5]
        mine = [release for release in decided if release.endpoint == endpoint]
        places = [
            int(1.25 * (32 if i.batch_max is None else i.batch_max)) - i.requests - i.deferred_requests for i in fresh
        ]
        assert len(mine) <= sum(max(0, each) for each in places)
        known = sum(waiting[release.batch, endpoint.model].tokens or 0 for release in mine)
        free = [1000 - one.kv_used_bytes - one.deferred_tokens for one in fresh]
        assert known <= sum(max(0.0, each) for each in free) + 1e-6


@given(
    instances=st.integers(1, 20),
    used=st.integers(0, 590),
    tokens=st.floats(1, 400),
    batch_max=st.integers(1, 50),
    deferred=st.integers(0, 5),
)
def test_idle_instances_are_given_as_many_each_as_one_alone_and_none_is_left_idle(
    instances: int, used: int, tokens: float, batch_max: int, deferred: int
) -> None:
    def released(number: int) -> int:
        each = {"batch_max": batch_max, "deferred_requests": deferred, "deferred_tokens": deferred * tokens}
        fleet = [instance(str(n), used, **each) for n in range(number)]
        return count(facts(fleet, [group(tokens=tokens)]))

    alone = released(1)
    assert released(instances) == instances * alone
    has_place, below = deferred < int(1.25 * batch_max), used + deferred * tokens < 600
    assert (alone > 0) == (has_place and below), "it is never starved while there is room"
    there = facts([instance("a", used, batch_max=batch_max)], [])
    assert has_room(there.instances, SETTINGS)


@given(used=st.integers(0, 1000), window=st.floats(0, 100), in_flight=st.integers(0, 100), tokens=st.floats(1, 300))
def test_a_batch_near_its_deadline_goes_faster(used: int, window: float, in_flight: int, tokens: float) -> None:
    limited = {"windows": {EAST: Window(requests=window)}, "in_flight": {EAST: in_flight}}
    calm = count(facts([instance("a", used)], [group(tokens=tokens)], **limited))
    urgent = count(facts([instance("a", used)], [old(tokens=tokens)], **limited))
    assert urgent >= calm
    if used < 600:
        assert urgent >= 1


def test_beside_interactive_requests_batches_begin_rarely_and_nothing_replaces_what_ends() -> None:
    def stepped(window: Window, at_s: float, in_flight: int, *fleet: InstanceFacts, other: str = "tide") -> Window:
        given = facts(
            list(fleet),
            [group(tokens=5000.0, input_tokens=100.0, left=0)],
            windows={EAST: window},
            in_flight={EAST: in_flight},
            interactive=frozenset({Endpoint(model=other, region="east")}),
        )
        return choose_windows(given, frozenset(), at_s, SETTINGS)[EAST]

    fast = [instance(str(n), prefill_token_s=0.0001) for n in range(4)]
    slow = [instance(str(n), prefill_token_s=0.1) for n in range(4)]
    full = msgspec.structs.replace(CALM, requests=500.0, begun_s=100.0)
    assert stepped(full, 100.1, 30, *fast).requests == 32, "0.05 / 0.01 s = 5 a second and instance"
    assert stepped(full, 100.1, 30, *slow).requests == 30, "of two a second, the signals"
    again = stepped(full, 100.5, 30, *slow)
    assert (again.requests, again.begun_s) == (31, 100.5)
    assert stepped(full, 109.0, 30, *fast).requests == 70, "those of two seconds at once"
    late = stepped(full, 100.7, 30, *slow)
    assert (late.requests, late.begun_s) == (31, pytest.approx(100.5)), "what is left of the time counts for the next"
    assert stepped(again, 100.6, 12, *slow).requests == 12
    assert stepped(full, 100.1, 30, *fast, other="x").requests == 400 * 1.25, "nobody asks for this model"
    shared = [*slow, instance("0", model="x")]
    assert stepped(full, 100.1, 30, *shared, other="x").requests == 30, "nor for one on its slots"


def begun(groups: list[GroupFacts], seconds: float, *, wait_s: float = 0.0, model: str = "tide") -> int:
    """How many requests of the model begin beside interactive ones, on instances that would begin one a second each, in
    one region with one and another with two.
    """
    regions = {"east": 1, "west": 2}
    fleet = [
        instance(f"{region}{n}", model=model, region=region, prefill_token_s=0.001, prefill_urgent_wait_s=wait_s)
        for region, count in regions.items()
        for n in range(count)
    ]
    endpoints = [Endpoint(model=model, region=region) for region in regions]
    windows, in_flight = dict.fromkeys(endpoints, Window(stepped_s=100.0, begun_s=100.0)), Counter[Endpoint]()
    for tick in range(int(10 * seconds)):
        given = ReleaseFacts(
            groups=tuple(groups),
            instances=tuple(fleet),
            windows=windows,
            in_flight=in_flight,
            interactive=frozenset(endpoints),
        )
        windows = dict(choose_windows(given, frozenset(), 100.1 + tick / 10, SETTINGS))
        in_flight = Counter({each: max(in_flight[each], int(windows[each].requests)) for each in endpoints})
    return in_flight.total()


SMALL = {"tokens": 1.0, "input_tokens": 50.0}


def due(left: int, calm_s: float, **changes: Any) -> GroupFacts:
    """A group that becomes urgent in so many seconds."""
    return group(left, left_s=calm_s + 0.25 * HOUR_S, age_s=0.75 * HOUR_S - calm_s, **(SMALL | changes))


@given(left=st.integers(0, 60_000), calm_s=st.floats(60, 2000), more=st.integers(0, 60_000))
def test_beside_interactive_requests_a_batch_begins_as_fast_as_it_has_to(left: int, calm_s: float, more: int) -> None:
    fewer, faster = begun([due(left, calm_s)], 2.0), begun([due(left + more, calm_s)], 2.0)
    per_s = min(max(left / calm_s, 3.0), 3 * SETTINGS.growth)
    assert fewer >= 1.8 * per_s - 2, "but what a tick begins, and a part of one in each region"
    assert faster >= fewer
    if (left + more) / calm_s > 10 and more > left and left / calm_s < 40:
        assert faster > fewer, "the one that would be late"
    assert begun([due(left, calm_s)], 2.0, wait_s=0.6) == 0, "first tokens would be late"


def test_a_batch_goes_faster_long_before_it_is_urgent_and_behind_those_due_before() -> None:
    assert begun([due(9000, 900.0)], 2.0) == pytest.approx(20, abs=2), "ten a second"
    assert begun([due(9000, 450.0)], 2.0) == pytest.approx(40, abs=2), "at the present rate it would be late"
    both = [due(9000, 900.0), due(9000, 1200.0, batch=2)]
    assert begun(both, 2.0) == pytest.approx(30, abs=2), "18,000 in 1,200 s"
    assert begun([due(3000, 900.0), *both[1:]], 2.0) == pytest.approx(20, abs=2), "12,000 in 1,200 s"
    elsewhere = [due(3000, 900.0), due(90_000, 900.0, batch=2, model="x")]
    assert begun(elsewhere, 2.0) == begun(elsewhere[:1], 2.0), "another model's lines"
    assert begun([due(9000, -1.0)], 2.0) == begun([due(0, 900.0)], 2.0), "urgent ones need no window"
