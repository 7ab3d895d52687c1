"""Which waiting requests move to an idle instance."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from controlplane.policies.facts import Endpoint, InstanceFacts
from controlplane.policies.rerouting import (
    ReroutingFacts,
    ReroutingSettings,
    WaitingRequest,
    choose_reroutes,
    may_reroute,
)
from dataplane.protocol.tiers import InstanceKind, Tier

UNTOLD = -1
SETTINGS = ReroutingSettings(fill_s=0.1)


def instance(name: str, wait_s: float | None = 0.0, **changes: Any) -> InstanceFacts:
    facts: dict[str, Any] = {
        "instance_id": name,
        "node_id": f"node-{name}",
        "endpoint": Endpoint(model="m", region="east"),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.0,
        "kv_used_bytes": 0,
        "kv_capacity_bytes": 1000,
        "remaining_tokens": 0,
        "prefill_wait_s": wait_s,
        "prefill_token_s": 0.001,
        "waiting": UNTOLD,
    }
    return InstanceFacts(**facts | changes)


def waiting(name: str, at: str = "a", *, sent_s: float = 0.0, **changes: Any) -> WaitingRequest:
    facts: dict[str, Any] = {"tier": Tier.IW_F, "input_tokens": 100} | changes
    return WaitingRequest(request_id=name, instance_id=at, sent_s=sent_s, **facts)


def queue(count: int, at: str = "a") -> tuple[WaitingRequest, ...]:
    return tuple(waiting(f"{at}{number}", at, sent_s=float(number)) for number in range(count))


def moves(*instances: InstanceFacts, queued: tuple[WaitingRequest, ...], **changes: Any) -> list[tuple[str, str]]:
    """Instances have begun none of these requests, unless they say so."""
    counts = Counter(request.instance_id for request in queued)
    instances = tuple(
        structs.replace(one, waiting=counts[one.instance_id]) if one.waiting == UNTOLD else one for one in instances
    )
    facts = ReroutingFacts(instances=instances, waiting=queued, **changes)
    return [(one.request_id, one.route.instance_id) for one in choose_reroutes(facts, 0.0, SETTINGS)]


def test_the_first_that_would_not_begin_soon_moves() -> None:
    """Of four requests in 4 s the second has 1 s before it; the first has none."""
    assert moves(instance("a", 4.0), instance("b"), queued=queue(4)) == [("a1", "b")]


@pytest.mark.parametrize("queued", [1, 3])
def test_what_has_begun_stays(queued: int) -> None:
    """A long prompt counts as the queue until its first token."""
    assert moves(instance("a", 9.0, waiting=0), instance("b"), queued=queue(queued)) == []
    assert moves(instance("a", 9.0, waiting=1), instance("b"), queued=queue(queued)) == []


def test_the_first_of_more_than_wait_have_begun() -> None:
    assert moves(instance("a", 2.0, waiting=2), instance("b"), queued=queue(4)) == [("a3", "b")]
    assert moves(instance("a", 2.0, waiting=1, sent_requests=1), instance("b"), queued=queue(4)) == [("a3", "b")]


def test_what_was_reported_a_while_ago_may_have_begun() -> None:
    assert moves(instance("a", 4.0, age_s=0.5), instance("b"), queued=queue(4)) == [("a2", "b")]


def test_the_order_in_which_requests_are_known_does_not_matter() -> None:
    assert moves(instance("b"), instance("a", 4.0), queued=tuple(reversed(queue(4)))) == [("a1", "b")]


def test_what_is_less_urgent_waits_behind_the_rest() -> None:
    late = waiting("n", tier=Tier.IW_N, sent_s=-1.0)
    assert moves(instance("a", 1.4), instance("b"), queued=(late, *queue(1))) == [("n", "b")]


def test_an_idle_instance_takes_what_keeps_it_at_work() -> None:
    """Forty requests in 1.2 s: four of them take 0.12 s."""
    moved = moves(instance("a", 1.2), instance("b"), queued=queue(40))
    assert moved == [("a17", "b"), ("a18", "b"), ("a19", "b"), ("a20", "b")]


def test_a_long_prompt_is_more_of_a_queue() -> None:
    long = [waiting(f"a{number}", sent_s=float(number), input_tokens=100 + number % 2 * 200) for number in range(40)]
    moved = moves(instance("a", 1.2), instance("b"), queued=tuple(long))
    assert [name for name, _ in moved] == ["a17", "a18", "a19"], "0.045, 0.015 and 0.045 s"


@pytest.mark.parametrize(("tokens", "moved"), [(159, "a2"), (160, "a1"), (None, "a1")])
def test_who_has_no_room_for_prompt_and_answer_takes_the_next(tokens: int | None, moved: str) -> None:
    first, *_ = asking = [
        waiting(f"a{number}", sent_s=float(number), output_tokens_max=most)
        for number, most in enumerate((50, 60, 50, 60))
    ]
    assert first.input_tokens == 100
    assert moves(instance("a", 4.0), instance("b", context_tokens=tokens), queued=tuple(asking)) == [(moved, "b")]


@pytest.mark.parametrize(("source", "moved"), [(159, ["a1"]), (160, [])])
def test_what_its_instance_takes_another_like_it_takes(source: int, moved: list[str]) -> None:
    """Prompts are estimated, and a node has accepted what waits there."""
    asking = tuple(waiting(f"a{number}", sent_s=float(number), output_tokens_max=60) for number in range(4))
    found = moves(instance("a", 4.0, context_tokens=source), instance("b", context_tokens=159), queued=asking)
    assert [name for name, _ in found] == moved


def test_several_idle_instances_share_the_longest_queues() -> None:
    queues = (*queue(4, "a"), *queue(4, "b"))
    moved = moves(instance("a", 6.0), instance("b", 6.05), instance("c"), instance("d"), queued=queues)
    assert [name for name, _ in moved] == ["b1", "a1"]
    assert {target for _, target in moved} == {"c", "d"}


def test_a_queue_gives_no_more_than_it_has_too_much() -> None:
    idle = [instance(name) for name in "bcdefg"]
    assert len(moves(instance("a", 1.25), *idle, queued=queue(40))) == 8, "each takes 0.03 s"


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_wait_s": 0.2},
        {"prefill_wait_s": None},
        {"sent_input_tokens": 200},
        {"accepting": False},
        {"age_s": 6.0},
        {"pooled": True},
        {"kind": InstanceKind.NIW},
        {"kv_used_bytes": 500},
        {"batch_max": 8, "requests": 6, "sent_requests": 2},
    ],
)
def test_an_instance_without_room_takes_nothing(changes: dict[str, Any]) -> None:
    assert moves(instance("a", 4.0), instance("b", **changes), queued=queue(4)) == []


@pytest.mark.parametrize("changes", [{"age_s": 6.0}, {"pooled": True}, {"prefill_wait_s": 1.0}])
def test_an_instance_without_a_known_queue_of_its_own_gives_nothing(changes: dict[str, Any]) -> None:
    source = instance("a", **{"wait_s": 4.0} | {k.replace("prefill_wait_s", "wait_s"): v for k, v in changes.items()})
    assert moves(source, instance("b"), queued=queue(4)) == []


def test_a_draining_instance_gives_nothing() -> None:
    """It serves what it has, and would not take it back."""
    assert moves(instance("a", 4.0, accepting=False), instance("b"), queued=queue(4)) == []


@pytest.mark.parametrize("avoided", ["b", "node-b"])
def test_what_keeps_failing_takes_nothing(avoided: str) -> None:
    assert moves(instance("a", 4.0), instance("b"), queued=queue(4), avoided=frozenset({avoided})) == []


@pytest.mark.parametrize(
    ("cached", "stays"),
    [({"a": 12}, False), ({"a": 13}, True), ({"a": 90, "b": 78}, False), ({"a": 90, "b": 77}, True)],
)
def test_a_conversation_stays_where_its_prompt_is_cached(cached: dict[str, int], *, stays: bool) -> None:
    """The last one has 1 s before it, a token takes 10 ms: it may lose 12 tokens, which count eightfold."""
    queued = (waiting("1"), waiting("2", sent_s=2.0, cached_tokens=cached))
    assert moves(instance("a", 2.0), instance("b"), queued=queued) == ([] if stays else [("2", "b")])


def test_others_go_past_those_that_stay() -> None:
    conversation = waiting("stays", sent_s=2.0, cached_tokens={"a": 100, "c": 100})
    queued = (*queue(2), conversation, waiting("goes", sent_s=3.0), waiting("last", sent_s=4.0))
    assert moves(instance("a", 1.5), instance("b"), queued=queued) == [("goes", "b")]
    assert moves(instance("a", 1.5), instance("c"), queued=queued) == [("stays", "c")]


def test_who_has_failed_a_request_does_not_get_it_again() -> None:
    queued = (*queue(2), waiting("b failed it", sent_s=2.0, excluded=frozenset({"b"})), waiting("goes", sent_s=3.0))
    assert moves(instance("a", 1.2), instance("b"), queued=queued) == [("goes", "b")]
    assert moves(instance("a", 1.2), instance("c"), queued=queued) == [("b failed it", "c")]


@pytest.mark.parametrize("processes", [1, 4, 16])
def test_several_processes_fill_an_idle_instance_about_once(processes: int) -> None:
    """Each process has sent its part of 64 requests in each of ten queues; in the mean of many looks."""
    instances = tuple(instance(f"a{number}", 2.0, waiting=64) for number in range(10))
    moved = 0
    for look in range(50):
        for process in range(processes):
            mine = tuple(
                waiting(f"{one.instance_id}.{number}", one.instance_id, sent_s=float(number))
                for one in instances
                for number in range(process, 64, processes)
            )
            moved += len(moves(*instances, instance("idle"), queued=mine, seed=100 * look + process))
    in_0_1_s = 64 * SETTINGS.fill_s / 2.0
    assert in_0_1_s * 0.75 < moved / 50 < in_0_1_s * 1.5


@pytest.mark.parametrize("processes", [4, 16])
def test_few_long_prompts_fill_an_idle_instance_about_once(processes: int) -> None:
    """Six requests in each of ten queues, sent by chance: a process has none in most of them."""
    instances = tuple(instance(f"a{number}", 3.0, waiting=6) for number in range(10))
    moved, looks = 0, 100
    for look in range(looks):
        chance = random.Random(look)
        sent: dict[int, list[WaitingRequest]] = {process: [] for process in range(processes)}
        for one in instances:
            for number in range(6):
                request = waiting(f"{one.instance_id}.{number}", one.instance_id, sent_s=float(number))
                sent[chance.randrange(processes)].append(request)
        for process, mine in sent.items():
            seed = 100 * look + process
            moved += len(moves(*instances, instance("idle"), queued=tuple(mine), seed=seed))
    assert 0.5 < moved / looks < 1.5, "one request of half a second fills it"


def test_processes_begin_with_different_instances() -> None:
    idle = [instance(name) for name in "bcde"]
    first = {moves(instance("a", 1.1), *idle, queued=queue(40), seed=seed)[0][1] for seed in range(20)}
    assert first == set("bcde")


@given(
    waits=st.lists(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0, 1.5, 9.0]), min_size=1, max_size=6),
    at=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=40),
)
def test_each_moves_once_away_from_a_long_queue(waits: list[float | None], at: list[tuple[int, int]]) -> None:
    counts = Counter(place for place, _ in at)
    instances = tuple(instance(str(number), wait_s, waiting=counts[number]) for number, wait_s in enumerate(waits))
    queued = tuple(
        waiting(str(number), str(place), sent_s=float(number), input_tokens=tokens)
        for number, (place, tokens) in enumerate(at)
    )
    facts = ReroutingFacts(instances=instances, waiting=queued)
    reroutes = choose_reroutes(facts, 0.0, SETTINGS)
    assert len({one.request_id for one in reroutes}) == len(reroutes)
    if reroutes:
        assert may_reroute(instances, SETTINGS)
    taken_s: dict[str, list[float]] = {}
    for one in reroutes:
        source, tokens = at[int(one.request_id)]
        assert (waits[source] or 0.0) > SETTINGS.wait_min_s
        queued_tokens = sum(tokens for place, tokens in at if place == source)
        taken_s.setdefault(one.route.instance_id, []).append((waits[source] or 0.0) * tokens / queued_tokens)
    for name, pieces in taken_s.items():
        assert waits[int(name)] is not None
        assert (waits[int(name)] or 0.0) + sum(pieces[:-1]) < SETTINGS.fill_s, "it had enough before the last one"
