"""Fences: an older claim of a request is refused, a newer one ends what the older one runs."""

import pytest

from dataplane.agent.fences import Fences
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineRequest
from dataplane.protocol.errors import StaleEpochError


def inflight(name: str) -> InflightRequest:
    request = EngineRequest(
        request_id=name,
        instance_id="i",
        tier="NIW",
        prompt=(1,),
        generated=(),
        max_tokens=4,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        ignore_eos=False,
    )
    return InflightRequest(request=request, model="m", arrived_s=0.0)


def test_a_newer_claim_ends_the_older_run_and_an_older_one_is_refused() -> None:
    fences, ended = Fences(keys_max=10), list[str]()

    def cancel(inflight: InflightRequest) -> None:
        ended.append(inflight.request_id)

    first, second = inflight("first"), inflight("second")
    fences.enter("a/1", 1)
    fences.run("a/1", 1, first, cancel)
    fences.enter("a/2", 1)  # another request
    fences.enter("a/1", 3)
    assert ended == ["first"]
    assert isinstance(first.outputs.pop(), StaleEpochError), "its reader gets the reason"
    fences.run("a/1", 3, second, cancel)
    with pytest.raises(StaleEpochError):
        fences.enter("a/1", 2)
    assert (ended, second.outputs.pop()) == (["first"], None)


def test_a_claim_that_came_while_another_was_tokenized_wins() -> None:
    fences = Fences(keys_max=10)
    fences.enter("a/1", 1)
    fences.enter("a/1", 2)
    with pytest.raises(StaleEpochError):
        fences.run("a/1", 1, inflight("late"), lambda _: None)


def test_the_same_claim_may_try_again_and_runs_once() -> None:
    fences, ended = Fences(keys_max=10), list[str]()
    one, two = inflight("one"), inflight("two")
    for each in (one, two):
        fences.enter("a/1", 1)
        fences.run("a/1", 1, each, lambda gone: ended.append(gone.request_id))
    assert ended == ["one"]


def test_requests_without_a_fence_are_nobodys() -> None:
    fences = Fences(keys_max=1)
    fences.enter(None, 0)
    fences.run(None, 0, inflight("one"), lambda _: None)
    fences.enter(None, 0)


def test_memory_is_bounded() -> None:
    fences = Fences(keys_max=2)
    for name in ("a", "b", "c"):
        fences.enter(name, 5)
    fences.enter("a", 1)  # forgotten
    with pytest.raises(StaleEpochError):
        fences.enter("c", 1)


def test_the_fence_of_a_request_in_flight_is_kept_however_many_come_after_it() -> None:
    fences, ended = Fences(keys_max=2), list[str]()

    def cancel(inflight: InflightRequest) -> None:
        ended.append(inflight.request_id)

    long = [inflight(f"long-{number}") for number in range(3)]  # more than keys_max at once
    for number, each in enumerate(long):
        fences.enter(f"l/{number}", 5)
        fences.run(f"l/{number}", 5, each, cancel)
    for name in ("a", "b", "c"):
        fences.enter(name, 5)
    for number in range(3):
        with pytest.raises(StaleEpochError):
            fences.enter(f"l/{number}", 4)
    with pytest.raises(StaleEpochError):
        fences.enter("c", 4)
    fences.enter("l/0", 6)
    assert ended == ["long-0"], "a newer claim still ends it"


def test_the_fence_of_a_request_that_ended_is_forgotten_in_its_turn() -> None:
    fences = Fences(keys_max=2)
    ending = inflight("ending")
    fences.enter("e", 5)
    fences.run("e", 5, ending, lambda _: None)
    del ending
    with pytest.raises(StaleEpochError):
        fences.enter("e", 4)
    for name in ("a", "b"):
        fences.enter(name, 5)
    fences.enter("e", 4)
