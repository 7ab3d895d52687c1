"""A slot whose models come and go, beside the live engine that has them all."""

import pytest
from msgspec.structs import replace

from dataplane.protocol.tiers import Objective
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.events import Events, Kind
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.pool_slot import PooledServer, PoolSlot
from tests.ops.simulator.replayed import replay
from tests.ops.simulator.servers.test_pool import MODELS, settings_of, traffic

SETTINGS = settings_of(10**6, 64, "swap")
LAST = MODELS[-1].name


class Slot:
    """One, with instances of some models."""

    def __init__(self, gpus: int = 1) -> None:
        self.events = Events()
        self.ended: list[Served] = []
        self.slot = PoolSlot(
            "n",
            0,
            "r",
            SETTINGS,
            gpus=gpus,
            events=self.events,
            answers=answers_by_model(clairvoyant=True),
            ended=self.ended.append,
        )
        self.instances: dict[str, PooledServer] = {}

    def open(self, *models: str) -> None:
        for spec in MODELS:
            if spec.name in models:
                self.instances[spec.name] = self.slot.add(f"i-{spec.name}", spec, lambda: 0.5)
                self.instances[spec.name].open(self.instances[spec.name].kind)

    def come(self, request: Request) -> None:
        served = Served(request=request, target=Objective(ttft_s=10.0, tbt_s=0.1))
        self.instances[request.model].submit(served)

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.events.at(request.arrived_s, Kind.ARRIVAL, self.come, request)
        while self.events.run(1):
            pass


def test_a_model_that_comes_later_is_served_as_if_it_had_always_been_there() -> None:
    requests = traffic(40, 4.0, seed=3)
    slot = Slot()
    slot.open(*(spec.name for spec in MODELS if spec.name != LAST))
    first_s = min(one.arrived_s for one in requests if one.model == LAST)
    slot.events.at(first_s, Kind.END, slot.open, LAST)
    slot.run(requests)
    live = replay(requests, SETTINGS, MODELS)
    assert sorted(one.request.number for one in slot.ended) == list(range(40))
    assert not any(one.left for one in slot.ended)
    late = [abs(one.last_s - live[one.request.number][-1]) for one in slot.ended]
    assert max(late) < 1.0, "but for lone turns, which are not renewed here"


def test_who_closes_serves_what_is_there_and_leaves_while_others_go_on() -> None:
    requests = traffic(40, 4.0, seed=3)
    closes_s = requests[20].arrived_s
    kept = [one for one in requests if one.model != LAST or one.arrived_s < closes_s]
    slot = Slot()
    slot.open(*(spec.name for spec in MODELS))
    gone_s: list[float] = []

    def emptied() -> None:
        gone_s.append(slot.events.now_s)
        slot.instances[LAST].leave()

    slot.events.at(closes_s, Kind.TICK, lambda: slot.instances[LAST].close(emptied))
    slot.run(kept)
    last = [one for one in slot.ended if one.request.model == LAST]
    assert gone_s == [pytest.approx(max(one.last_s for one in last))]
    assert gone_s[0] > closes_s
    assert len(slot.ended) == len(kept)
    assert not slot.slot.has(LAST)
    assert not slot.slot.server.has(LAST)
    assert list(slot.instances[LAST].reports()) == []
    slot.open(LAST)
    assert [one.accepting for one in slot.instances[LAST].reports()] == [True], "it may come again"


def test_an_empty_one_leaves_at_once() -> None:
    slot = Slot()
    slot.open(LAST)
    gone: list[bool] = []
    slot.instances[LAST].close(lambda: gone.append(True))
    assert gone == [True]


def test_what_is_lost_is_told_by_model_and_nothing_moves_any_more() -> None:
    requests = traffic(12, 40.0, seed=4)
    slot = Slot()
    slot.open(*(spec.name for spec in MODELS))
    lost: dict[str, list[Served]] = {}
    lost_s = requests[-1].arrived_s + 0.01

    def lose() -> None:
        lost.update({name: one.lose() for name, one in slot.instances.items()})

    slot.events.at(lost_s, Kind.END, lose)
    slot.run(requests)
    ended = {one.request.number for one in slot.ended}
    assert {one.request.number for some in lost.values() for one in some} == set(range(12)) - ended
    assert all(one.request.model == name for name, some in lost.items() for one in some)
    assert all(one.last_s <= lost_s for one in slot.ended)


def test_a_pooled_instance_is_told_under_its_own_name() -> None:
    slot = Slot()
    slot.open("m0", "m1")
    [told] = slot.instances["m1"].reports()
    assert (told.instance_id, told.node_id, told.slot, told.endpoint.model) == ("i-m1", "n", 0, "m1")
    assert (told.accepting, told.load, told.kv_capacity_bytes) == (True, 0.5, SETTINGS.kv_bytes)


def test_a_request_whose_prefill_has_begun_does_not_wait() -> None:
    """Of two long prompts the first is computed in three steps."""
    slot = Slot()
    slot.open("m0")
    long = Request(number=0, arrived_s=1.0, model="m0", origin="r", tier="IW-N", prompt_tokens=6000, output_tokens=2)
    told: list[tuple[int, int, int]] = []

    def look() -> None:
        [report] = slot.instances["m0"].reports()
        without_token = sum(one.made == 0 for one in slot.slot.server.inside("m0"))
        told.append((report.requests, without_token, report.waiting))

    for step in range(300):
        slot.events.at(1.0 + 0.01 * step, Kind.END, look)
    slot.run([long, replace(long, number=1, arrived_s=1.005)])
    assert (2, 2, 2) in told, "neither has begun"
    assert (2, 2, 1) in told, "the first has no token yet, but KV"


def test_requests_without_a_first_token_are_reported_as_waiting() -> None:
    requests = traffic(30, 40.0, seed=4)
    slot = Slot()
    slot.open(*(spec.name for spec in MODELS))
    told: list[tuple[int, int]] = []

    def look() -> None:
        reports = [report for one in slot.instances.values() for report in one.reports()]
        told.append((sum(one.waiting for one in reports), sum(one.requests for one in reports)))

    slot.events.at(requests[-1].arrived_s + 0.01, Kind.END, look)
    slot.run(requests)
    look()
    (waiting, in_flight), after = told
    assert 0 < waiting < in_flight
    assert after == (0, 0)


def test_a_slot_of_two_gpus_switches_over_two_ways_to_the_host() -> None:
    requests = traffic(40, 4.0, seed=3)
    ended_s: dict[int, list[float]] = {}
    for gpus in (1, 2):
        slot = Slot(gpus)
        slot.open(*(spec.name for spec in MODELS))
        slot.run(requests)
        live = replay(requests, SETTINGS, MODELS, gpus=gpus)
        assert max(abs(one.last_s - live[one.request.number][-1]) for one in slot.ended) < 2.0
        ended_s[gpus] = [one.last_s for one in slot.ended]
    assert sum(ended_s[2]) < sum(ended_s[1])
