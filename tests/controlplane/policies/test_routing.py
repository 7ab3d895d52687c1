"""Routing: region by preference and utilization, then the shortest queue (SageServe 6.1, 6.2)."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import Endpoint, InstanceFacts, RoutingFacts
from controlplane.policies.routing import RoutingSettings, choose_preference, choose_route, is_usable, utilization_of
from dataplane.protocol.tiers import Tier

SETTINGS = RoutingSettings(utilization_max=0.7, stale_s=5.0)


def instance(name: str, region: str = "east", *, used: int = 0, of: int = 100, **changes: Any) -> InstanceFacts:
    values: dict[str, Any] = {
        "instance_id": name,
        "node_id": f"node-{name}",
        "endpoint": Endpoint(model="tide", region=region),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.5,
        "kv_used_bytes": used,
        "kv_capacity_bytes": of,
        "remaining_tokens": 0,
    }
    return InstanceFacts(**(values | changes))


def facts(*instances: InstanceFacts, **changes: Any) -> RoutingFacts:
    values: dict[str, Any] = {
        "model": "tide",
        "tier": Tier.IW_F,
        "preference": ("east", "central", "west"),
        "instances": instances,
    }
    return RoutingFacts(**(values | changes))


ROWS = [
    # name, instances, the one chosen, its region's utilization
    ("home is first", [instance("w", "west"), instance("e", "east")], "e", 0.0),
    ("69 % is below 70 %", [instance("e", used=69), instance("c", "central")], "e", 0.69),
    ("70 % is not", [instance("e", used=70), instance("c", "central")], "c", 0.0),
    (
        "skips one",
        [instance("e", used=90), instance("c", "central", used=71), instance("w", "west", used=60)],
        "w",
        0.6,
    ),
    (
        "all full: least",
        [instance("e", used=90), instance("c", "central", used=80), instance("w", "west", used=85)],
        "c",
        0.8,
    ),
    ("equally full: preference", [instance("w", "west", used=80), instance("e", used=80)], "e", 0.8),
    (
        "over its instances: (90 + 40) / 200",
        [instance("a", used=90), instance("b", used=40, remaining_tokens=9), instance("c", "central")],
        "a",
        0.65,
    ),
    (
        "by bytes: (90 + 10) / 400",
        [instance("a", used=90), instance("b", used=10, of=300, remaining_tokens=1)],
        "a",
        0.25,
    ),
    (
        "shortest queue: 50 + 60 > 90 + 0",
        [instance("a", remaining_tokens=50, sent_tokens=60), instance("b", remaining_tokens=90)],
        "b",
        0.0,
    ),
    ("same queue: by id", [instance("b"), instance("a")], "a", 0.0),
    (
        "sent counts as used: 10 + 6 x 10 = 70",
        [instance("e", used=10, sent_tokens=6, kv_bytes_per_token=10), instance("c", "central")],
        "c",
        0.0,
    ),
    ("no capacity is full", [instance("e", of=0), instance("c", "central", used=99)], "c", 0.99),
    ("a region nobody prefers is last", [instance("m", "mars"), instance("w", "west")], "w", 0.0),
    ("but it is taken", [instance("m", "mars"), instance("w", "west", used=70)], "m", 0.0),
    ("5.0 s is fresh", [instance("e", age_s=5.0)], "e", 0.0),
    ("stale gives way", [instance("e", age_s=5.1), instance("w", "west")], "w", 0.0),
    ("draining gives way, its memory too", [instance("e", used=99, accepting=False), instance("f", used=10)], "f", 0.1),
    (
        "another model is not it",
        [replace(instance("e"), endpoint=Endpoint(model="x", region="east")), instance("w", "west")],
        "w",
        0.0,
    ),
]


@pytest.mark.parametrize(("instances", "chosen", "utilization"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_route(instances: list[InstanceFacts], chosen: str, utilization: float) -> None:
    for order in (instances, instances[::-1]):
        route = choose_route(facts(*order), 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert (route.instance_id, route.node_id) == (chosen, f"node-{chosen}")
        assert route.utilization == pytest.approx(utilization)


def test_excluded_instances_are_not_tried_again() -> None:
    two = (instance("a"), instance("b", remaining_tokens=5))
    route = choose_route(facts(*two, excluded=frozenset({"a"})), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == "b"


@pytest.mark.parametrize(
    ("instances", "excluded", "words"),
    [
        ([], set(), "no instance of 'tide' is placed"),
        (
            [replace(instance("a"), endpoint=Endpoint(model="x", region="east"))],
            set(),
            "no instance of 'tide' is placed",
        ),
        ([instance("a")], {"a"}, "has just failed this request"),
        ([instance("a", age_s=6), instance("b", age_s=9)], set(), "has reported in the last 5 s"),
        ([instance("a", accepting=False)], set(), "is ready yet"),
        ([instance("a", accepting=False), instance("b", age_s=6)], set(), "is ready yet"),
    ],
)
def test_no_route_says_why(instances: list[InstanceFacts], excluded: set[str], words: str) -> None:
    answer = choose_route(facts(*instances, excluded=frozenset(excluded)), 0.0, SETTINGS)
    assert isinstance(answer, NoRoute)
    assert words in answer.reason


def test_a_region_that_it_was_released_to_is_kept_to() -> None:
    home, away = instance("e", accepting=False), instance("w", "west")
    assert choose_route(facts(home, away, only_region="east"), 0.0, SETTINGS) == NoRoute(
        reason="no instance of 'tide' is ready yet"
    )
    assert choose_route(facts(home, away, only_region="south"), 0.0, SETTINGS) == NoRoute(
        reason="no instance of 'tide' is placed in the region 'south'"
    )


def test_nothing_available_is_full() -> None:
    assert utilization_of([]) == 1.0


@pytest.mark.parametrize(
    ("why", "instances", "cached", "chosen"),
    [
        # scores are remaining + sent - 8 * cached
        ("30000 - 24000 > 5000", [("a", 30_000), ("b", 5000)], {"a": 3000}, "b"),
        ("28000 - 24000 < 5000", [("a", 28_000), ("b", 5000)], {"a": 3000}, "a"),
        ("the longer hit at equal load", [("a", 500), ("b", 500), ("c", 500)], {"a": 100, "b": 900}, "b"),
        ("a hot instance leaves the others their hits", [("a", 10**6), ("b", 600), ("c", 0)], {"a": 99, "b": 99}, "b"),
        ("a shared beginning of 64 tokens moves 512", [("a", 513), ("b", 0)], {"a": 64}, "b"),
        ("an instance that is gone", [("a", 1), ("b", 0)], {"z": 5000}, "b"),
    ],
)
def test_a_hit_is_worth_the_prefill_it_saves(
    why: str, instances: list[tuple[str, int]], cached: dict[str, int], chosen: str
) -> None:
    asked = [instance(name, remaining_tokens=tokens) for name, tokens in instances]
    route = choose_route(facts(*asked, input_tokens=5000, cached_tokens=cached), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert (route.instance_id, route.cached_tokens) == (chosen, cached.get(chosen, 0)), why


@pytest.mark.parametrize(
    ("cached", "requests", "chosen"),
    [
        # alone: at most twice the mean, and 4: of 36, 9 and 3 requests 36; of 37, 9 and 3 36.7
        ({"a": 4000}, 36, "a"),
        ({"a": 4000}, 37, "b"),
        ({"a": 4000, "c": 1999}, 36, "a"),
        # beside another with half as much: at most the mean, and 4: of 12, 9 and 3 requests 12; of 13, 9 and 3 12.3
        ({"a": 4000, "c": 2000}, 12, "a"),
        ({"a": 4000, "c": 2000}, 13, "c"),
    ],
)
def test_an_instance_with_more_requests_than_the_others_gets_none_for_its_cache(
    cached: dict[str, int], requests: int, chosen: str
) -> None:
    asked = [
        instance("a", remaining_tokens=100, requests=requests - 5, sent_requests=5),
        instance("b", remaining_tokens=90, requests=9),
        instance("c", remaining_tokens=95, requests=3),
    ]
    route = choose_route(facts(*asked, input_tokens=5000, cached_tokens=cached), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == chosen


@pytest.mark.parametrize(("requests", "chosen"), [(16, "a"), (17, "b")])
def test_a_second_instance_gets_prompts_that_the_first_has(requests: int, chosen: str) -> None:
    """Twice the mean of two is all of their requests: that would be no bound."""
    asked = [instance("a", remaining_tokens=500 * requests, requests=requests), instance("b", remaining_tokens=0)]
    route = choose_route(facts(*asked, input_tokens=9000, cached_tokens={"a": 8000}), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == chosen


@pytest.mark.parametrize(("requests", "chosen"), [(0, "b"), (8, "b"), (10, "a")])
def test_a_cached_token_counts_for_as_many_as_wait_for_it_to_be_computed_and_for_eight_at_least(
    requests: int, chosen: str
) -> None:
    asked = [
        instance("a", remaining_tokens=9_000, requests=requests),
        instance("b", remaining_tokens=0, requests=requests),
    ]
    route = choose_route(facts(*asked, input_tokens=5000, cached_tokens={"a": 1000}), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == chosen


@pytest.mark.parametrize(
    ("why", "used", "cached", "region"),
    [
        ("a conversation returns to the region that has half of it", 0, 500, "west"),
        ("a shared beginning does not leave the preferred region", 0, 499, "east"),
        ("a region above the threshold", 70, 1000, "east"),
    ],
)
def test_a_conversation_returns_to_its_region(why: str, used: int, cached: int, region: str) -> None:
    there = facts(
        instance("e"), instance("w", "west", used=used), input_tokens=1000, cached_tokens={"w": cached, "e": 0}
    )
    route = choose_route(there, 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.region == region, why


def test_processes_that_know_nothing_of_a_conversation_agree_on_its_home() -> None:
    names = [f"i{number}" for number in range(8)]

    def chosen(key: int, names: list[str], **load: int) -> str:
        asked = [instance(name, remaining_tokens=load.get(name, 0)) for name in names]
        route = choose_route(facts(*asked, home_key=key.to_bytes(4), input_tokens=1000), 0.0, SETTINGS)
        assert isinstance(route, Route)
        return route.instance_id

    homes = {key: chosen(key, names) for key in range(200)}
    assert homes == {key: chosen(key, names[::-1]) for key in homes}
    assert set(homes.values()) == set(names), "conversations are spread"
    kept = {key: chosen(key, names[:-1]) for key in homes}
    assert all(kept[key] == home for key, home in homes.items() if home != "i7"), "only those of `i7` move"
    home = homes[0]
    assert chosen(0, names, **{home: 2399}) == home, "home counts as 300 tokens of 1000 cached"
    assert chosen(0, names, **{home: 2401}) != home
    other = next(name for name in names if name != home)
    known = facts(*map(instance, names), home_key=bytes(4), input_tokens=1000, cached_tokens={other: 301})
    route = choose_route(known, 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == other, "what is known counts for more"


INSTANCES = st.lists(
    st.builds(
        instance,
        st.uuids().map(str),
        st.sampled_from(["east", "central", "west", "mars"]),
        used=st.integers(0, 100),
        of=st.integers(0, 100),
        accepting=st.booleans(),
        age_s=st.floats(0, 10),
        remaining_tokens=st.integers(0, 1000),
        sent_tokens=st.integers(0, 1000),
        kv_bytes_per_token=st.integers(0, 2),
        endpoint=st.builds(Endpoint, model=st.sampled_from(["tide", "x"]), region=st.sampled_from(["east", "west"])),
    ),
    max_size=8,
)


@given(instances=INSTANCES, excluded=st.integers(0, 3))
def test_safety_and_liveness(instances: list[InstanceFacts], excluded: int) -> None:
    """Never to what is not usable; always somewhere if anything is."""
    left_out = frozenset(i.instance_id for i in instances[:excluded])
    good = {
        i.instance_id: i
        for i in instances
        if is_usable(i, SETTINGS.stale_s) and i.endpoint.model == "tide" and i.instance_id not in left_out
    }
    route = choose_route(facts(*instances, excluded=left_out), 0.0, SETTINGS)
    assert isinstance(route, Route) == bool(good)
    if isinstance(route, Route):
        chosen = good[route.instance_id]
        assert (chosen.node_id, chosen.endpoint.region) == (route.node_id, route.region)
        beside = [i for i in good.values() if i.endpoint == chosen.endpoint]
        assert min(i.remaining_tokens + i.sent_tokens for i in beside) == chosen.remaining_tokens + chosen.sent_tokens


def test_what_keeps_failing_is_left_alone_while_there_is_another() -> None:
    home, away = instance("e"), instance("w", "west")
    for avoided in ("e", "node-e"):
        chosen = choose_route(facts(home, away, avoided=frozenset({avoided})), 0.0, SETTINGS)
        assert isinstance(chosen, Route)
        assert chosen.instance_id == "w"
    alone = choose_route(facts(home, avoided=frozenset({"e"})), 0.0, SETTINGS)
    assert isinstance(alone, Route)
    assert alone.instance_id == "e"


ROOM_ROWS = [
    # name, tokens that `e` and `w` hold, those of prompt and answer, changes of the facts, the one chosen
    ("who has not the room is left out", 999, 5000, (900, 100), {}, "w"),
    ("... the last token counts", 1000, 5000, (900, 100), {}, "e"),
    ("an answer without a limit takes what there is", 999, 5000, (900, 0), {}, "e"),
    ("what is not reported is no limit", None, 5000, (9000, 100), {}, "e"),
    ("nobody has the room: the one that may say so", 999, 999, (900, 100), {}, "e"),
    ("one that fails before one without room", 999, 5000, (900, 100), {"avoided": frozenset({"w"})}, "w"),
    ("a region that it was released to", 1000, 5000, (900, 100), {"only_region": "east"}, "e"),
    ("... has no room: another one", 999, 5000, (900, 100), {"only_region": "east"}, "w"),
    ("... and the other is busy", 999, 5000, (900, 100), {"only_region": "east", "used": 70}, None),
    ("... nor has another one", 999, 999, (900, 100), {"only_region": "east"}, "e"),
    ("not one that has failed it", 999, 5000, (900, 100), {"excluded": frozenset({"w"})}, "e"),
]


@pytest.mark.parametrize(
    ("home", "away", "tokens", "changes", "chosen"), [r[1:] for r in ROOM_ROWS], ids=[r[0] for r in ROOM_ROWS]
)
def test_a_request_goes_where_prompt_and_answer_have_room(
    home: int | None, away: int | None, tokens: tuple[int, int], changes: dict[str, Any], chosen: str | None
) -> None:
    used = changes.get("used", 0)
    instances = instance("e", context_tokens=home), instance("w", "west", context_tokens=away, used=used)
    others = {name: value for name, value in changes.items() if name != "used"}
    route = choose_route(
        facts(*instances, input_tokens=tokens[0], output_tokens_max=tokens[1], **others), 0.0, SETTINGS
    )
    if isinstance(route, NoRoute):
        assert chosen is None
        assert route.waits
        assert route.reason.startswith(
            "no instance of 'tide' in the region 'east' takes 1000 tokens, and those of other"
        )
    else:
        assert route.instance_id == chosen


def test_regions_are_preferred_by_latency() -> None:
    regions = ("a", "b", "c", "d")
    far = {("b", "a"): 60.0, ("b", "d"): 20.0, ("a", "c"): 1.0}
    assert choose_preference(regions, "b", far) == ("b", "d", "a", "c"), "home, the nearest, then the unknown"
    assert choose_preference(regions, "c", {}) == ("c", "a", "b", "d")
    assert choose_preference(regions, None, far) == regions
    assert choose_preference(regions, "b", {("b", other): 5.0 for other in "acd"}) == ("b", "a", "c", "d")


def timed(name: str, wait_s: float | None, region: str = "east", **changes: Any) -> InstanceFacts:
    """An instance that would begin after so long, at 1,000 prompt tokens a second."""
    values = {"prefill_wait_s": wait_s, "prefill_urgent_wait_s": wait_s, "prefill_token_s": 0.001} | changes
    return instance(name, region, **values)


def shared(name: str, wait_s: float | None, region: str = "east", **changes: Any) -> InstanceFacts:
    return timed(name, wait_s, region, pooled=True, **changes)


TIMELY_ROWS = [
    # name, instances, tokens of the prompt, what is cached of it, the one chosen
    ("well in time at home", [timed("e", 0.4), timed("w", 0.0, "west")], 100, {}, "e"),
    ("in time at home, well in time elsewhere", [timed("e", 0.5), timed("w", 0.3, "west")], 100, {}, "w"),
    ("in time at home, nobody well in time", [timed("e", 0.8), timed("w", 0.5, "west")], 100, {}, "e"),
    ("late at home, in time elsewhere", [timed("e", 1.0), timed("w", 0.8, "west")], 100, {}, "w"),
    ("what is cached is not computed", [timed("e", 0.4), timed("w", 0.1, "west")], 400, {"e": 300}, "e"),
    ("late, but has half of it cached", [timed("e", 1.5), timed("w", 0.1, "west")], 300, {"e": 150}, "e"),
    ("late, and has less than half of it cached", [timed("e", 1.5), timed("w", 0.1, "west")], 300, {"e": 149}, "w"),
    ("late anywhere by its own length: who begins at once", [timed("e", 0.1), timed("w", 0.0, "west")], 2000, {}, "w"),
    ("late anywhere", [timed("e", 3.0), timed("w", 2.0, "west")], 100, {}, "e"),
    ("who runs all it can", [timed("e", 0.0, requests=8, batch_max=8), timed("w", 0.9, "west")], 50, {}, "w"),
    ("a wait that is not known is none", [timed("e", None), timed("w", 0.0, "west")], 100, {}, "e"),
]


@pytest.mark.parametrize(
    ("instances", "tokens", "cached", "chosen"), [row[1:] for row in TIMELY_ROWS], ids=[r[0] for r in TIMELY_ROWS]
)
def test_who_is_well_in_time_goes_first(
    instances: list[InstanceFacts], tokens: int, cached: dict[str, int], chosen: str
) -> None:
    for order in (instances, instances[::-1]):
        request = facts(*order, ttft_s=1.0, input_tokens=tokens, cached_tokens=cached)
        route = choose_route(request, 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert route.instance_id == chosen


def test_urgent_requests_go_by_the_wait_of_urgent_ones() -> None:
    """A queue of requests that they overtake keeps no urgent ones away."""
    home, away = timed("e", 3.0, prefill_urgent_wait_s=0.1), timed("w", 0.2, "west")
    for tier, chosen in ((Tier.IW_F, "e"), (Tier.IW_N, "w")):
        route = choose_route(facts(home, away, tier=tier, ttft_s=1.0, input_tokens=100), 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert route.instance_id == chosen


def test_with_other_processes_the_shorter_of_two_drawn_queues_is_taken() -> None:
    """Whatever the draw: never the longest, and the shortest in about two of five draws of five."""
    fleet = [instance(f"i{number}", remaining_tokens=100 * number) for number in range(5)]
    taken: Counter[str] = Counter()
    for draw in range(5 * 4 * 10):
        route = choose_route(facts(*fleet, draw=draw), 0.0, SETTINGS)
        assert isinstance(route, Route)
        taken[route.instance_id] += 1
    assert taken == {"i0": 80, "i1": 60, "i2": 40, "i3": 20}, "each pair is drawn equally often"


def test_what_is_cached_is_considered_whatever_the_draw() -> None:
    fleet = [instance(f"i{number}", remaining_tokens=100) for number in range(5)]
    for draw in range(20):
        route = choose_route(facts(*fleet, draw=draw, input_tokens=50, cached_tokens={"i3": 40}), 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert route.instance_id == "i3"


@given(draw=st.integers(0, 2**32 - 1), count=st.integers(1, 2))
def test_of_two_instances_both_are_considered(draw: int, count: int) -> None:
    fleet = [instance(f"i{number}", remaining_tokens=100 - number) for number in range(count)]
    route = choose_route(facts(*fleet, draw=draw), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == f"i{count - 1}"


RESERVE_ROWS = [
    # name, instances, tokens of the prompt, the one chosen
    ("its own go first", [timed("own", 0.1), shared("slot", 0.0)], 300, "own"),
    ("... unless it is not well in time", [timed("own", 0.3), shared("slot", 0.0)], 300, "slot"),
    ("... and the reserve is", [timed("own", 0.3), shared("slot", 0.8)], 300, "own"),
    ("a slot that runs all it can", [timed("own", 0.3), shared("slot", 0.0, requests=8, batch_max=8)], 300, "own"),
    (
        "own ones elsewhere go before the reserve",
        [timed("own", 2.0), timed("w", 0.1, "west"), shared("s", 0.0)],
        1,
        "w",
    ),
    ("a wait that is not known is none", [timed("own", None), shared("slot", 0.0)], 500, "own"),
    ("no own one", [shared("slot", 0.0)], 500, "slot"),
    ("the reserve of the nearest region", [timed("own", 2.0), shared("w", 0.0, "west"), shared("e", 0.1)], 1, "e"),
    ("nobody is in time: who begins first", [timed("own", 3.0), shared("slot", 2.0)], 1, "slot"),
    ("... its own where both do", [timed("own", 3.0), shared("slot", 3.0)], 1, "own"),
    ("a prompt that is late anywhere begins at once", [timed("own", 0.2), shared("slot", 0.0)], 5000, "slot"),
    ("a slot that works for it already", [shared("s1", 0.0), shared("s2", 0.2, remaining_tokens=9)], 1, "s2"),
    ("... unless it does not keep up", [shared("s1", 0.0), shared("s2", 0.2, remaining_tokens=9, load=1.1)], 1, "s1"),
    ("the emptiest slot", [shared("s1", 0.0, used=50), shared("s2", 0.0, used=40)], 1, "s2"),
]


@pytest.mark.parametrize(
    ("instances", "tokens", "chosen"), [row[1:] for row in RESERVE_ROWS], ids=[r[0] for r in RESERVE_ROWS]
)
def test_the_reserve_takes_what_no_own_instance_makes_in_time(
    instances: list[InstanceFacts], tokens: int, chosen: str
) -> None:
    for order in (instances, instances[::-1]):
        route = choose_route(facts(*order, ttft_s=1.0, input_tokens=tokens), 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert route.instance_id == chosen


def test_a_pool_is_no_reserve() -> None:
    """Alone in its region, it serves that region's requests, whoever has instances of their own elsewhere."""
    for order in ([shared("slot", 0.2), timed("own", 0.0, "west")], [timed("own", 0.0, "west"), shared("slot", 0.2)]):
        route = choose_route(facts(*order, ttft_s=1.0, input_tokens=300), 0.0, SETTINGS)
        assert isinstance(route, Route)
        assert route.instance_id == "slot"


def test_without_an_objective_the_reserve_is_left_alone() -> None:
    route = choose_route(facts(timed("own", 900.0), shared("slot", 0.0), ttft_s=None), 0.0, SETTINGS)
    assert isinstance(route, Route)
    assert route.instance_id == "own"
