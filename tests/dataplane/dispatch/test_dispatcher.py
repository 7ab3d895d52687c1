"""Where requests go: assignment, KV transfer, lost workers, cancelling; with workers that only record commands."""

from typing import Any

import pytest
from msgspec.structs import replace

from dataplane.dispatch.dispatcher import Dispatcher
from dataplane.dispatch.worker import WorkerKind
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats, KvHandle
from dataplane.protocol.errors import BadRequestError, DataplaneError, WorkerLostError
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.prefill import PrefillSettings

HANDLE = KvHandle(file="kv-0-1", slab_bytes=256, shape=(1, 1, 1, 16, 2), blocks=(3,), tokens=2)


Command = EngineRequest | tuple[str, str]
"""A request to run, or ("cancel" or "release", its id)."""


class RecordingWorker:
    """A worker that keeps its commands in a list."""

    def __init__(self, index: int, kind: WorkerKind) -> None:
        self.index = index
        self.kind = kind
        self.ready = True
        self.stats = EngineStats()
        self.commands: list[Command] = []

    def is_ready(self, instance_id: str) -> bool:
        return self.ready

    def add(self, request: EngineRequest) -> None:
        self.commands.append(request)

    def cancel(self, request_id: str) -> None:
        self.commands.append(("cancel", request_id))

    def release(self, request_id: str) -> None:
        self.commands.append(("release", request_id))

    def take(self) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken


class Node:
    """A dispatcher over workers of the given kinds, p, d or b."""

    def __init__(self, kinds: str, losses_max: int = 3) -> None:
        names: dict[str, WorkerKind] = {"p": "prefill", "d": "decode", "b": "both"}
        self.workers = [RecordingWorker(index, names[kind]) for index, kind in enumerate(kinds)]
        self.dispatcher = Dispatcher(self.workers, PrefillSettings(), losses_max=losses_max, clock=lambda: 0.0)

    def output(self, worker: int, request_id: str, *token_ids: int, **changes: Any) -> None:
        output = EngineOutput(request_id=request_id, token_ids=token_ids, **changes)
        self.dispatcher.receive(self.workers[worker], output)

    def lose(self, worker: int, *, died: bool = True) -> None:
        lost = self.workers[worker]
        lost.ready = False
        lost.take()
        self.dispatcher.worker_lost(lost, died=died)

    def commands(self) -> list[list[Command]]:
        """The new commands of each worker."""
        return [worker.take() for worker in self.workers]


def request(request_id: str = "r1", instance_id: str = "i1") -> EngineRequest:
    return EngineRequest(request_id=request_id, instance_id=instance_id, tier="IW-F", prompt=(1, 2), max_tokens=9)


def continued(*generated: int, kv: KvHandle | None = None, request_id: str = "r1") -> EngineRequest:
    return replace(request(request_id), generated=generated, kv=kv)


def test_a_request_is_prefilled_decoded_elsewhere_and_its_kv_released() -> None:
    node = Node("pd")
    inflight = node.dispatcher.submit(request(), "tide")
    assert node.commands() == [[continued()], []]
    assert [group.model for group in node.dispatcher.queue(0).groups] == ["tide"]
    node.output(0, "r1", 7, kv=HANDLE)
    assert node.commands() == [[], [continued(7, kv=HANDLE)]]
    assert node.dispatcher.queue(0).groups == ()
    assert inflight.outputs.pop().token_ids == (7,)  # type: ignore[union-attr]
    node.output(1, "r1", 8)
    assert node.commands() == [[("release", "r1")], []]
    node.output(1, "r1", 9, finish_reason="length")
    assert node.commands() == [[], []]
    assert (len(node.dispatcher), node.dispatcher.handovers_total) == (0, 1)


def test_a_request_that_ends_with_its_first_token_is_not_decoded() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.commands()
    node.output(0, "r1", 7, finish_reason="length")
    assert node.commands() == [[], []]
    assert (len(node.dispatcher), node.dispatcher.queue(0).groups) == (0, ())


@pytest.mark.parametrize("step", ["queued", "transferred", "decoding"])
def test_cancelling_frees_both_workers(step: str) -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    if step != "queued":
        node.output(0, "r1", 7, kv=HANDLE)
    if step == "decoding":
        node.output(1, "r1", 8)
    node.commands()
    node.dispatcher.cancel("r1")
    cancel, release = ("cancel", "r1"), ("release", "r1")
    expected = {"queued": [[cancel], []], "transferred": [[release], [cancel]], "decoding": [[], [cancel]]}
    assert node.commands() == expected[step]
    assert (len(node.dispatcher), node.dispatcher.queue(0).groups) == (0, ())
    node.dispatcher.cancel("r1")
    assert node.commands() == [[], []]


def test_kv_of_a_request_that_was_just_cancelled_is_released() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.dispatcher.cancel("r1")
    node.commands()
    node.output(0, "r1", 7, kv=HANDLE)
    assert node.commands() == [[("release", "r1")], []]


def test_another_worker_prefills_what_a_lost_one_had() -> None:
    node = Node("ppd")
    for name in ("r1", "r2"):
        node.dispatcher.submit(request(name), "tide")
    first, second, _ = node.commands()
    assert (len(first), len(second)) == (2, 0), "the second joined the group of the first"
    node.output(0, "r2", 7, kv=HANDLE)
    node.commands()
    node.lose(0)
    assert node.commands() == [[], [continued()], []]
    assert node.dispatcher.queue(0).groups == ()
    node.output(2, "r2", 8)
    assert node.commands() == [[], [], []], "the KV is gone with its worker: there is nothing to release"


def test_a_lost_decode_worker_costs_a_prefill_only_where_the_kv_is_not_kept() -> None:
    node = Node("pdd")
    for name in ("r1", "r2"):
        node.dispatcher.submit(request(name), "tide")
        node.output(0, name, 7, kv=HANDLE)
    _, first, second = node.commands()
    assert (first, second) == ([continued(7, kv=HANDLE)], [continued(7, kv=HANDLE, request_id="r2")])
    node.output(1, "r1", 8)
    node.commands()
    node.lose(1)
    assert node.commands() == [[continued(7, 8)], [], []]
    node.lose(2)
    assert node.commands() == [[], [], []], "it waits, and its KV with it"
    assert node.dispatcher.count(None) == 1
    node.workers[1].ready = True
    node.dispatcher.assign_waiting("i1")
    assert node.commands() == [[], [continued(7, kv=HANDLE, request_id="r2")], []]


def test_a_waiting_request_is_prefilled_again_when_its_kv_is_lost() -> None:
    node = Node("pd")
    node.dispatcher.submit(request(), "tide")
    node.output(0, "r1", 7, kv=HANDLE)
    node.lose(1)
    node.lose(0)
    node.workers[0].ready = node.workers[1].ready = True
    node.dispatcher.assign_waiting("i1")
    assert node.commands() == [[continued(7)], []]


def test_a_request_over_which_too_many_workers_died_ends() -> None:
    node = Node("b", losses_max=1)
    inflight = node.dispatcher.submit(request(), "tide")
    for died in (True, False, False, True):
        assert inflight.outputs.pop() is None, "a process that is reassigned is no fault of the request"
        node.lose(0, died=died)
        node.workers[0].ready = True
        node.dispatcher.assign_waiting("i1")
    assert isinstance(inflight.outputs.pop(), WorkerLostError)
    assert len(node.dispatcher) == 0


def test_decodes_join_their_model() -> None:
    node = Node("pdd")
    assigned = {}
    for name, model in (("a", "ebb"), ("b", "tide"), ("c", "tide"), ("d", "ebb"), ("e", "tide"), ("f", "flood")):
        node.dispatcher.submit(request(name), model)
        node.output(0, name, 7, kv=HANDLE)
        assigned[name] = next(index for index in (1, 2) if node.workers[index].take())
    assert assigned == {"a": 1, "b": 2, "c": 2, "d": 1, "e": 2, "f": 1}


def test_where_workers_do_both_a_request_goes_where_it_decodes_best() -> None:
    """To an idle worker first; then to its model, and else to the worker with the fewest models."""
    node = Node("bbb")
    assigned = {}
    for name, model in (("a", "ebb"), ("b", "tide"), ("c", "flood"), ("d", "ebb"), ("e", "neap"), ("f", "neap")):
        node.dispatcher.submit(request(name), model)
        assigned[name] = next(index for index in range(3) if node.workers[index].take())
        node.output(assigned[name], name, 7)  # after its prefill it is in no queue any more
    assert assigned == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1, "f": 1}


def test_an_id_is_in_flight_once() -> None:
    node = Node("b")
    node.dispatcher.submit(request(), "tide")
    with pytest.raises(BadRequestError, match="r1 is in flight already"):
        node.dispatcher.submit(request(), "tide")


def test_the_outlook_is_that_of_the_worker_with_the_least_to_prefill() -> None:
    node = Node("pbd")
    assert node.dispatcher.prefill_outlook("i1", "tide", "IW-N") == (0.0, PrefillPace().token_s)
    for number in range(2):  # both in the same group, on one worker
        node.dispatcher.submit(request(f"r{number}"), "tide")
    assert node.dispatcher.prefill_outlook("i1", "tide", "IW-N") == (0.0, PrefillPace().token_s)
    node.workers[1].ready = False
    waits_s = PrefillPace().switch_s + 2 * len(request("r").prompt) * PrefillPace().token_s
    assert node.dispatcher.prefill_outlook("i1", "tide", "IW-N") == (pytest.approx(waits_s), PrefillPace().token_s)
    node.workers[0].ready = False
    assert node.dispatcher.prefill_outlook("i1", "tide", "IW-N") is None, "a decode worker prefills nothing"


class RefusingWorker(RecordingWorker):
    """A worker to which some requests cannot be sent, as where their numbers have no encoding."""

    def add(self, request: EngineRequest) -> None:
        if request.request_id.startswith("bad"):
            raise OverflowError("can't serialize ints >= 2**64")
        super().add(request)


@pytest.mark.parametrize("kind", ["both", "prefill"])
def test_nothing_is_left_of_a_request_that_cannot_be_sent(kind: WorkerKind) -> None:
    worker = RefusingWorker(0, kind)
    dispatcher = Dispatcher([worker], PrefillSettings(), losses_max=3, clock=lambda: 0.0)
    for _ in range(2):
        with pytest.raises(DataplaneError, match="cannot be sent to a worker: OverflowError"):
            dispatcher.submit(request("bad"), "tide")
    assert (len(dispatcher), dispatcher.count(0), dispatcher.queue(0).groups) == (0, 0, ())
    assert worker.take() == []
    dispatcher.submit(request(), "tide")
    dispatcher.worker_lost(worker, died=True)
    assert worker.take() == [continued(), continued()]


@pytest.mark.parametrize("again", ["assign_waiting", "worker_lost", "receive"])
def test_a_request_that_cannot_be_sent_later_costs_no_other(again: str) -> None:
    kinds: tuple[WorkerKind, WorkerKind] = ("prefill", "decode") if again == "receive" else ("both", "both")
    first, second = RecordingWorker(0, kinds[0]), RefusingWorker(1, kinds[1])
    dispatcher = Dispatcher([first, second], PrefillSettings(), losses_max=3, clock=lambda: 0.0)
    first.ready, second.ready = again != "assign_waiting", again == "receive"
    requests = {name: dispatcher.submit(request(name), "tide") for name in ("bad", "good")}
    second.ready = True
    if again == "assign_waiting":
        dispatcher.assign_waiting("i1")
    elif again == "worker_lost":
        first.ready = False
        dispatcher.worker_lost(first, died=True)
    else:
        for name in requests:
            dispatcher.receive(first, EngineOutput(request_id=name, token_ids=(7,), kv=HANDLE))
        assert ("release", "bad") in first.take()
    *_, error = iter(requests["bad"].outputs.pop, None)
    assert isinstance(error, DataplaneError)
    assert "OverflowError" in error.message
    assert (len(dispatcher), dispatcher.count(1), len(second.take())) == (1, 1, 1)
