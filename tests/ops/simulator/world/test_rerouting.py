"""Waiting requests move to an instance that is idle, by the live policy and once."""

from collections.abc import Callable

import pytest

from controlplane.policies.decisions import Route
from controlplane.policies.rerouting import ReroutingSettings
from dataplane.protocol.tiers import IW_F, NIW, InstanceKind, Objective, Tier
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.network import Network
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.traffic.presence import Presence
from ops.simulator.world.rerouting import Rerouter
from ops.simulator.world.routing import KnownPrompts
from tests.ops.simulator.replayed import LATENCY

TARGET = Objective(ttft_s=1.0, tbt_s=0.05)


class Pair:
    """An instance in each of two regions, 100 ms apart; the first has requests, and the second is idle."""

    def __init__(self, count: int, *, tier: Tier = IW_F, settings: ReroutingSettings | None = None) -> None:
        self.events, self.ended = Events(), list[Served]()
        self.answers = answers_by_model(clairvoyant=True)
        self.present = Presence(self.answers)
        self.home, self.idle = self._server("home", "east"), self._server("idle", "west")
        self.sent: list[tuple[int, str, float]] = []
        network = Network(("east", "west"), {("east", "west"): 100.0})
        settings = settings or ReroutingSettings()
        self.rerouter = Rerouter(self.present, self.events, network, KnownPrompts(1), self._send_to, settings)
        for number in range(count):
            request = Request(
                number=number,
                arrived_s=0.0,
                model="m",
                origin="east",
                tier=tier,
                prompt_tokens=2000,
                output_tokens=3,
            )
            self.home.submit(Served(request, TARGET))

    def _server(self, name: str, region: str) -> DedicatedServer:
        server = DedicatedServer(
            name,
            region,
            ModelCosts(name="m", latency=LATENCY, weights_bytes=1, kv_bytes_per_token=1, bytes_per_s=1.0),
            InstanceSettings(kv_bytes=10**6),
            gpu_type="H800",
            events=self.events,
            answers=self.answers["m"],
            ended=self.ended.append,
        )
        server.open(InstanceKind.MIXED)
        self.present.place(server)
        return server

    def _send_to(self, request: Request, route: Route) -> None:
        """Deliver at once: the way to an instance is the world's."""
        self.sent.append((request.number, route.instance_id, self.events.now_s))
        self.present.view("m")
        self.present.sent(request, route.instance_id)
        self.idle.submit(Served(request, TARGET))

    def run(self, until: Callable[[], bool]) -> None:
        """Look every second."""
        now_s = 0.0
        while not until():
            self.present.tick()
            self.rerouter.look()
            while self.events.run(1):
                pass
            now_s += 1.0
            self.events.now_s = now_s
            for server in (self.home, self.idle):
                server.advance(now_s)


def test_the_idle_instance_takes_some_and_each_request_ends_once() -> None:
    pair = Pair(60)
    pair.run(lambda: len(pair.ended) == 60)
    assert sorted(one.request.number for one in pair.ended) == list(range(60))
    moved = [number for number, _, _ in pair.sent]
    assert moved
    assert len(set(moved)) == len(moved), "each once"
    assert {name for _, name, _ in pair.sent} == {"idle"}
    assert pair.home.remaining_tokens == pair.idle.remaining_tokens == 0
    assert pair.idle.busy_s > 0


def test_what_moves_first_is_the_first_that_would_wait_long() -> None:
    pair = Pair(60)
    pair.events.now_s = 0.5
    [home] = [one for one in pair.present.view("m").values() if one.instance_id == "home"]
    assert home.prefill_wait_s is not None
    waiting = [one.request.number for one in pair.home.waiting()]
    pair.rerouter.look()
    [(number, _, at_s), *_] = pair.sent
    before_s = home.prefill_wait_s * waiting.index(number) / len(waiting)
    assert before_s == pytest.approx(ReroutingSettings().margin_s, abs=home.prefill_wait_s / len(waiting))
    assert at_s == 0.5, "home is in the region that it came from"


def test_all_wait_less_on_average() -> None:
    alone, pair = Pair(60, settings=ReroutingSettings(wait_min_s=1e9)), Pair(60)
    for each in (alone, pair):
        each.run(lambda each=each: len(each.ended) == 60)
    first_s = [sum(one.first_s for one in each.ended) / 60 for each in (alone, pair)]
    assert first_s[1] < first_s[0]
    assert not alone.sent


@pytest.mark.parametrize("settings", [None, ReroutingSettings(wait_min_s=1e9)])
def test_deferred_requests_and_short_queues_stay(settings: ReroutingSettings | None) -> None:
    pair = Pair(60, tier=NIW if settings is None else IW_F, settings=settings)
    pair.run(lambda: len(pair.ended) == 60)
    assert not pair.sent


def test_what_has_begun_stays() -> None:
    pair = Pair(20)
    waiting = pair.home.waiting()
    begun = [one for one in [*pair.home.lose()] if one not in waiting]
    assert begun
    pair = Pair(20)
    [first, *_] = [one for one in pair.home._instance.inside if one not in pair.home.waiting()]
    assert not pair.home.withdraw(first)
    tokens = pair.home.remaining_tokens
    last = pair.home.waiting()[-1]
    assert pair.home.withdraw(last)
    assert not pair.home.withdraw(last), "it is gone"
    assert pair.home.remaining_tokens == tokens - last.request.prompt_tokens - last.left


def test_a_lost_instance_gives_nothing() -> None:
    pair = Pair(20)
    last = pair.home.waiting()[-1]
    pair.home.lose()
    assert not pair.home.waiting()
    assert not pair.home.withdraw(last)
