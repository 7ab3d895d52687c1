"""Where requests go: placing, handing over, lost workers, cancelling; with slots that only note what they are told."""

from typing import Any

import pytest

from dataplane.agent.dispatch import Dispatcher
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats, KvHandle
from dataplane.protocol.errors import BadRequestError, WorkerLostError
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.worker.frames import Add, Cancel, Command, Release

HANDLE = KvHandle(file="kv-0-1", slab_bytes=256, shape=(1, 1, 1, 16, 2), blocks=(3,), tokens=2)


class NotedSlot:
    """A slot whose worker is a list."""

    def __init__(self, index: int, kind: str) -> None:
        self.index = index
        self.kind = kind
        self.ready = True
        self.stats = EngineStats()
        self.told: list[Command] = []

    def is_ready(self, instance_id: str) -> bool:
        return self.ready

    def send(self, command: Command) -> None:
        self.told.append(command)

    def take(self) -> list[Command]:
        told, self.told = self.told, []
        return told


class Node:
    """A dispatcher over slots of the given kinds, p, d or b."""

    def __init__(self, kinds: str, losses_max: int = 3) -> None:
        names = {"p": "prefill", "d": "decode", "b": "both"}
        self.slots = [NotedSlot(index, names[kind]) for index, kind in enumerate(kinds)]
        slots: Any = self.slots
        self.dispatcher = Dispatcher(slots, PrefillSettings(), losses_max=losses_max)

    def hear(self, slot: int, request_id: str, *token_ids: int, **changes: Any) -> None:
        told: Any = self.slots[slot]
        self.dispatcher.hear(told, EngineOutput(request_id=request_id, token_ids=token_ids, **changes))

    def lose(self, slot: int, *, died: bool = True) -> None:
        lost: Any = self.slots[slot]
        lost.ready = False
        lost.take()
        self.dispatcher.lose(lost, died=died)

    def told(self) -> list[list[Command]]:
        """What each slot was told since the last look."""
        return [slot.take() for slot in self.slots]


def request(request_id: str = "r1", instance_id: str = "i1") -> EngineRequest:
    return EngineRequest(request_id=request_id, instance_id=instance_id, tier="IW-F", prompt=(1, 2), max_tokens=9)


def continued(*generated: int, kv: KvHandle | None = None, request_id: str = "r1") -> Add:
    whole = EngineRequest(
        request_id=request_id,
        instance_id="i1",
        tier="IW-F",
        prompt=(1, 2),
        max_tokens=9,
        generated=generated,
        kv=kv,
    )
    return Add(request=whole)


def test_a_request_is_prefilled_handed_over_and_released() -> None:
    node = Node("pd")
    inflight = node.dispatcher.submit(request(), "tide")
    assert node.told() == [[continued()], []]
    assert [group.model for group in node.dispatcher.queue(0).groups] == ["tide"]
    node.hear(0, "r1", 7, kv=HANDLE)
    assert node.told() == [[], [continued(7, kv=HANDLE)]]
    assert node.dispatcher.queue(0).groups == ()
    assert inflight.outputs.take()[0].token_ids == (7,)  # type: ignore[union-attr]
    node.hear(1, "r1", 8)
    assert node.told() == [[Release(request_id="r1")], []]
    node.hear(1, "r1", 9, finish_reason="length")
    assert node.told() == [[], []]
    assert (len(node.dispatcher), node.dispatcher.handovers_total) == (0, 1)


def test_what_ends_in_its_prefill_goes_nowhere() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.told()
    node.hear(0, "r1", 7, finish_reason="length")
    assert node.told() == [[], []]
    assert (len(node.dispatcher), node.dispatcher.queue(0).groups) == (0, ())


@pytest.mark.parametrize("step", ["queued", "handed over", "decoding"])
def test_cancelling_frees_both_sides(step: str) -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    if step != "queued":
        node.hear(0, "r1", 7, kv=HANDLE)
    if step == "decoding":
        node.hear(1, "r1", 8)
    node.told()
    node.dispatcher.cancel("r1")
    cancel, release = Cancel(request_id="r1"), Release(request_id="r1")
    expected = {"queued": [[cancel], []], "handed over": [[release], [cancel]], "decoding": [[], [cancel]]}
    assert node.told() == expected[step]
    assert (len(node.dispatcher), node.dispatcher.queue(0).groups) == (0, ())
    node.dispatcher.cancel("r1")
    assert node.told() == [[], []]


def test_kv_handed_over_just_when_its_request_was_cancelled_is_released() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.dispatcher.cancel("r1")
    node.told()
    node.hear(0, "r1", 7, kv=HANDLE)
    assert node.told() == [[Release(request_id="r1")], []]


def test_a_lost_prefill_worker_is_made_good_by_another() -> None:
    node = Node("ppd")
    for name in ("r1", "r2"):
        node.dispatcher.submit(request(name), "tide")
    first, second, _ = node.told()
    assert (len(first), len(second)) == (2, 0), "the second joined the group of the first"
    node.hear(0, "r2", 7, kv=HANDLE)
    node.told()
    node.lose(0)
    assert node.told() == [[], [continued()], []]
    assert node.dispatcher.queue(0).groups == ()
    node.hear(2, "r2", 8)
    assert node.told() == [[], [], []], "the KV is gone with its worker: there is nothing to release"


def test_a_lost_decode_worker_costs_a_prefill_only_where_the_kv_is_not_held() -> None:
    node = Node("pdd")
    for name in ("r1", "r2"):
        node.dispatcher.submit(request(name), "tide")
        node.hear(0, name, 7, kv=HANDLE)
    _, first, second = node.told()
    assert (first, second) == ([continued(7, kv=HANDLE)], [continued(7, kv=HANDLE, request_id="r2")])
    node.hear(1, "r1", 8)
    node.told()
    node.lose(1)
    assert node.told() == [[continued(7, 8)], [], []]
    node.lose(2)
    assert node.told() == [[], [], []], "it waits, and its KV with it"
    assert node.dispatcher.count(None) == 1
    node.slots[1].ready = True
    node.dispatcher.place_waiting("i1")
    assert node.told() == [[], [continued(7, kv=HANDLE, request_id="r2")], []]


def test_what_waits_with_kv_is_prefilled_again_when_the_kv_is_lost() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.hear(0, "r1", 7, kv=HANDLE)
    node.lose(1)
    node.lose(0)
    node.slots[0].ready = node.slots[1].ready = True
    node.dispatcher.place_waiting("i1")
    assert node.told() == [[continued(7)], []]


def test_a_request_over_which_too_many_workers_died_ends() -> None:
    node = Node("b", losses_max=1)
    inflight = node.dispatcher.submit(request(), "tide")
    for died in (True, False, False, True):
        assert not inflight.outputs.take(), "one that makes way is nobody's fault"
        node.lose(0, died=died)
        node.slots[0].ready = True
        node.dispatcher.place_waiting("i1")
    assert isinstance(inflight.outputs.take()[0], WorkerLostError)
    assert len(node.dispatcher) == 0


def test_decodes_join_their_model() -> None:
    node = Node("pdd")
    placed = {}
    for name, model in (("a", "ebb"), ("b", "tide"), ("c", "tide"), ("d", "ebb"), ("e", "tide"), ("f", "flood")):
        node.dispatcher.submit(request(name), model)
        node.hear(0, name, 7, kv=HANDLE)
        placed[name] = next(index for index in (1, 2) if node.slots[index].take())
    assert placed == {"a": 1, "b": 2, "c": 2, "d": 1, "e": 2, "f": 1}


def test_where_slots_do_both_a_request_goes_where_it_decodes_best() -> None:
    """To an idle slot first; then to its model, and else to the slot with the fewest models."""
    node = Node("bbb")
    placed = {}
    for name, model in (("a", "ebb"), ("b", "tide"), ("c", "flood"), ("d", "ebb"), ("e", "neap"), ("f", "neap")):
        node.dispatcher.submit(request(name), model)
        placed[name] = next(index for index in range(3) if node.slots[index].take())
        node.hear(placed[name], name, 7)  # it is past its prefill: no queue says any more where it is
    assert placed == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1, "f": 1}


def test_an_id_is_in_flight_once() -> None:
    node = Node("b")
    node.dispatcher.submit(request(), "tide")
    with pytest.raises(BadRequestError, match="r1 is in flight already"):
        node.dispatcher.submit(request(), "tide")


def test_the_outlook_is_that_of_the_slot_with_the_least_to_prefill() -> None:
    node = Node("pbd")
    assert node.dispatcher.prefill_outlook("i1", "IW-N") == (0.0, PrefillPace().token_s)
    for number in range(2):  # both for the same group: they wait on one slot
        node.dispatcher.submit(request(f"r{number}"), "tide")
    assert node.dispatcher.prefill_outlook("i1", "IW-N") == (0.0, PrefillPace().token_s)
    node.slots[1].ready = False
    waits_s = PrefillPace().switch_s + 2 * len(request("r").prompt) * PrefillPace().token_s
    assert node.dispatcher.prefill_outlook("i1", "IW-N") == (pytest.approx(waits_s), PrefillPace().token_s)
    node.slots[0].ready = False
    assert node.dispatcher.prefill_outlook("i1", "IW-N") is None, "a decode slot begins nothing"
