"""Grouped prefill: who joins which group, which slot it goes to, which group is served, and how far order may bend."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.ordering import Order
from dataplane.scheduling.prefill import (
    GroupState,
    PrefillQueue,
    PrefillRequest,
    PrefillSettings,
    choose_group,
    choose_prefill_slot,
)
from dataplane.scheduling.tiers import TIER_OBJECTIVES

SETTINGS = PrefillSettings()


def request(name: str, model: str, arrived_s: float = 0.0, tier: Tier = "IW-N", tokens: int = 100) -> PrefillRequest:
    ttft_s = TIER_OBJECTIVES[tier].ttft_s
    return PrefillRequest(request_id=name, model=model, tokens=tokens, tier=tier, arrived_s=arrived_s, ttft_s=ttft_s)


def queue_of(text: str, settings: PrefillSettings = SETTINGS) -> PrefillQueue:
    """Models by letter, one request each, a second apart: "aab" is a0, a1, b2."""
    queue = PrefillQueue()
    for index, model in enumerate(text):
        queue = queue.join(request(f"{model}{index}", model, float(index)), settings)
    return queue


def drawn(queue: PrefillQueue) -> list[str]:
    return [" ".join(waiting.request_id for waiting in group.waiting) for group in queue.groups]


def test_requests_join_the_first_group_of_their_model() -> None:
    assert drawn(queue_of("abacab")) == ["a0 a2 a4", "b1 b5", "c3"]


def test_a_group_takes_eight_over_its_life() -> None:
    queue = queue_of("a" * 8)
    for name in ("a0", "a1", "a2"):
        queue = queue.remove(name)  # serving one frees no capacity
    queue = queue.join(request("b", "b"), SETTINGS).join(request("a8", "a"), SETTINGS)
    assert drawn(queue) == ["a3 a4 a5 a6 a7", "b", "a8"]


def test_batch_requests_have_groups_of_their_own() -> None:
    queue = queue_of("ab").join(request("z", "a", tier="NIW"), SETTINGS).join(request("a9", "a"), SETTINGS)
    assert drawn(queue) == ["a0 a9", "b1", "z"]


@pytest.mark.parametrize(
    ("order", "tier", "ahead"),
    [
        ("edf", "IW-F", ["old"]),  # due in 1 s; the IW-N requests in 2 s and in 50 s, the other IW-F in half a second
        ("edf", "IW-N", ["aged", "young", "old"]),
        ("pf", "IW-F", ["old"]),
        ("fcfs", "IW-F", ["aged", "young", "old"]),
        ("fcfs", "NIW", ["aged", "young", "old", "batch"]),
    ],
)
def test_whom_a_newcomer_could_not_overtake(order: Order, tier: Tier, ahead: list[str]) -> None:
    settings = PrefillSettings(order=order)
    queue = PrefillQueue()
    arrivals: dict[str, tuple[Tier, float]] = {
        "aged": ("IW-N", 42.0),
        "young": ("IW-N", 90.0),
        "old": ("IW-F", 99.5),
        "batch": ("NIW", 1.0),
    }
    for name, (of, arrived_s) in arrivals.items():
        queue = queue.join(request(name, name, arrived_s, of), settings)
    assert drawn(queue.ahead_of("new", tier, TIER_OBJECTIVES[tier].ttft_s, 100.0, settings)) == ahead


@pytest.mark.parametrize(
    ("model", "ahead"),
    [
        ("a", ["old", "due"]),  # it overtakes the IW-N requests of either group
        ("b", ["n0 old", "n1 due"]),  # of another model: groups, which are served whole
    ],
)
def test_of_its_own_model_alone_a_newcomer_overtakes_requests(model: str, ahead: list[str]) -> None:
    settings = PrefillSettings(group_requests_max=2)
    queue = PrefillQueue()
    arrivals: dict[str, tuple[Tier, float]] = {
        "n0": ("IW-N", 95.0),
        "old": ("IW-F", 99.0),
        "n1": ("IW-N", 99.1),
        "due": ("IW-F", 99.9),
    }
    for name, (tier, arrived_s) in arrivals.items():
        queue = queue.join(request(name, "a", arrived_s, tier), settings)
    assert drawn(queue) == ["n0 old", "n1 due"]
    assert drawn(queue.ahead_of(model, "IW-F", 1.0, 100.0, settings)) == ahead


def test_removing() -> None:
    queue = queue_of("ab")
    assert queue.remove("nobody") == queue
    assert drawn(queue.remove("a0")) == ["b1"]
    assert queue.remove("a0").remove("b1") == PrefillQueue()


@pytest.mark.parametrize(
    ("running", "load_s"),
    [
        (None, 3 * 0.1 + 0.5 + 0.7),  # switches to a, then to b
        ("a", 3 * 0.1 + 0.7),
        ("b", 3 * 0.1 + 0.5 + 0.7),  # away from b, and back
    ],
)
def test_load_counts_steps_and_switches(running: str | None, load_s: float) -> None:
    queue = queue_of("aba")
    switch_s = {"a": 0.5, "b": 0.7}
    tokens_s = queue.load_s(lambda waiting: sum(r.tokens for r in waiting) / 1000, switch_s.__getitem__, running)
    assert tokens_s == pytest.approx(load_s)


def test_load_of_groups_of_one_model_in_a_row_counts_one_switch() -> None:
    queue = queue_of("a" * 9)
    assert len(queue.groups) == 2
    assert queue.load_s(lambda _: 0.0, lambda _: 1.0, None) == 1.0


@pytest.mark.parametrize(
    ("queues", "loads_s", "slot", "joins"),
    [
        ({0: "b", 1: "a"}, {0: 0.1, 1: 9.0}, 1, True),  # a group that accepts it, however loaded its slot
        ({0: "b", 1: "a" * 8}, {0: 0.1, 1: 9.0}, 0, False),  # that group is full
        ({0: "a", 1: "a"}, {0: 9.0, 1: 0.1}, 0, True),  # the first of two
        ({0: "b", 1: "c"}, {0: 0.2, 1: 0.1}, 1, False),
        ({2: "", 1: ""}, {2: 0.0, 1: 0.0}, 1, False),  # a tie
    ],
)
def test_slot(queues: dict[int, str], loads_s: dict[int, float], slot: int, joins: bool) -> None:
    there = {number: queue_of(text) for number, text in queues.items()}
    assert choose_prefill_slot(request("new", "a"), there, loads_s.__getitem__, SETTINGS) == slot
    grown = there[slot].join(request("new", "a"), SETTINGS)
    assert (len(grown.groups) == len(there[slot].groups)) == joins


@pytest.mark.parametrize(
    ("text", "running", "serving", "overtaken", "chosen"),
    [
        ("abc", None, None, None, "a"),  # first come
        ("abc", "b", None, None, "b"),  # spares two switches
        ("abc", "b", None, "a0", "a"),  # a was passed over once
        ("abc", "b", None, "x9", "b"),  # another one was
        ("abc", "b", "c2", None, "c"),  # begun is served to its end
        ("abc", "a", None, None, "a"),
    ],
)
def test_group(text: str, running: str | None, serving: str | None, overtaken: str | None, chosen: str) -> None:
    state = GroupState(serving=serving, overtaken=overtaken)
    choice = choose_group(queue_of(text).groups, running, state, 10.0, SETTINGS)
    assert choice is not None
    assert choice.group.model == chosen
    assert choice.state.serving == choice.group.group_id
    assert sorted(group.model for group in (choice.group, *choice.following)) == sorted(text)


def test_no_groups_no_choice() -> None:
    assert choose_group((), "a", GroupState(), 0.0, SETTINGS) is None


def test_batch_requests_wait_even_if_begun_or_at_hand() -> None:
    queue = PrefillQueue().join(request("z", "z", 0.0, "NIW"), SETTINGS).join(request("a", "a", 5.0), SETTINGS)
    choice = choose_group(queue.groups, "z", GroupState(serving="z"), 10.0, SETTINGS)
    assert choice is not None
    assert choice.group.group_id == "a"


@pytest.mark.parametrize(
    ("order", "chosen", "inside"),
    [
        ("fcfs", "a", ["n0", "n1", "f2"]),
        ("edf", "b", ["f0"]),  # due at 4.0; f2 at 4.5
        ("pf", "b", ["f0"]),
        ("dpa", "b", ["f0"]),  # neither is urgent at 2.0
    ],
)
def test_order_rules_groups_and_what_is_in_them(order: Order, chosen: str, inside: list[str]) -> None:
    settings = PrefillSettings(order=order)
    queue = PrefillQueue()
    for joined in (
        request("n0", "a", 0.0),
        request("n1", "a", 1.0),
        request("f2", "a", 3.5, "IW-F"),
        request("f0", "b", 3.0, "IW-F"),
    ):
        queue = queue.join(joined, settings)
    choice = choose_group(queue.groups, None, GroupState(), 2.0, settings)
    assert choice is not None
    assert choice.group.model == chosen
    assert [r.request_id for r in choice.group.in_order(2.0, settings)] == inside
    edf = replace(settings, order="edf")
    assert [r.request_id for r in queue.groups[0].in_order(2.0, edf)] == ["f2", "n0", "n1"]


@pytest.mark.parametrize(
    ("order", "first"), [("edf", ["f5", "f6", "n0"]), ("pf", ["f5", "f6", "n0"]), ("fcfs", ["n0", "n1", "n2"])]
)
def test_requests_of_one_model_alone_go_in_order_whatever_their_groups(order: Order, first: list[str]) -> None:
    """An urgent one waits for no group that was begun."""
    settings = PrefillSettings(order=order, group_requests_max=3)
    queue = PrefillQueue().join(request("z", "a", 0.0, "NIW"), settings)
    for number in range(5):
        queue = queue.join(request(f"n{number}", "a", float(number)), settings)
    for number in (5, 6):
        queue = queue.join(request(f"f{number}", "a", float(number), "IW-F"), settings)
    assert drawn(queue) == ["z", "n0 n1 n2", "n3 n4 f5", "f6"]
    choice = choose_group(queue.groups, "a", GroupState(serving="n0"), 7.0, settings)
    assert choice is not None
    assert [one.request_id for one in choice.group.in_order(7.0, settings)] == first
    following = [one.request_id for group in choice.following for one in group.waiting]
    assert sorted([*first, *following]) == sorted(one.request_id for group in queue.groups for one in group.waiting)


def test_a_batch_request_is_never_served_beside_others_of_its_model() -> None:
    queue = PrefillQueue().join(request("z", "a", 0.0, "NIW"), SETTINGS).join(request("a1", "a", 5.0), SETTINGS)
    choice = choose_group(queue.groups, "a", GroupState(serving="z"), 10.0, SETTINGS)
    assert choice is not None
    assert [one.request_id for one in choice.group.waiting] == ["a1"]
    alone = choose_group(queue.remove("a1").groups, "a", choice.state, 10.0, SETTINGS)
    assert alone is not None
    assert [one.request_id for one in alone.group.waiting] == ["z"]


@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=60),
    limit=st.integers(1, 8),
)
def test_nobody_is_overtaken_by_much(arrivals: list[tuple[str, int]], limit: int) -> None:
    """Requests come while others are served. A group at the front waits for those that a group may take, twice."""
    settings_ = PrefillSettings(group_requests_max=limit)
    queue, state, running = PrefillQueue(), GroupState(), None
    served: list[str] = []
    admitted: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    coming = list(enumerate(arrivals))
    while coming or queue.groups:
        for index, (model, _) in coming[: 1 + coming[0][1][1] if coming else 0]:
            queue = queue.join(request(f"{model}{index}", model, float(index)), settings_)
        coming = coming[1 + coming[0][1][1] :] if coming else []
        choice = choose_group(queue.groups, running, state, 1e4, settings_)
        assert choice is not None
        state, running = choice.state, choice.group.model
        name = choice.group.in_order(1e4, settings_)[0].request_id
        admitted[choice.group.group_id] += 1
        front = queue.groups[0]
        if front.group_id != choice.group.group_id:
            waited[front.group_id] += 1
        queue = queue.remove(name)
        served.append(name)
    assert len(served) == len(set(served)) == len(arrivals)
    assert max(admitted.values()) <= limit
    assert max(waited.values(), default=0) <= 2 * limit  # the rest of the one begun, and one at hand
    for model in "abcd":
        own = [int(name[1:]) for name in served if name[0] == model]
        assert own == sorted(own)
