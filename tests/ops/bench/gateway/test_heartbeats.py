"""The benchmark of heartbeats: a real gateway accepts them, and its shares add up."""

import asyncio
from functools import partial

import msgspec
import pytest

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.redis.live import LiveStore
from ops.bench.gateway.heartbeats import Used, beat, figures
from ops.bench.gateway.stack import fill_fleet
from tests.controlplane.world import served


def test_its_beats_are_taken_and_seen(settings: Settings) -> None:
    fleet = fill_fleet(settings, nodes=3, instances=2)
    bodies = [msgspec.json.encode(one) for one in fleet.heartbeats]
    with served(make_app(settings.model_copy(update={"node_keys_unbound": True}))) as url:
        port = int(url.rsplit(":", 1)[1])
        asyncio.run(beat(port, fleet.node_key, bodies, count=4, per_s=1000.0))
        live = LiveStore(settings)
        seen = live.read_view().nodes
        live.close()
        assert {name: len(node.heartbeat.instances) for name, node in seen.items()} == {f"n{n:05}": 2 for n in range(3)}
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            asyncio.run(beat(port, "tp-node-wrong", bodies, count=1, per_s=1.0))


def test_idling_is_no_part_of_a_beat() -> None:
    used = partial(Used, wall_s=10.0)
    before = used(beats=0, cpu_s={"gateway": 0.5, "postgres": 0.0, "valkey": 0.0})
    beating = used(beats=500, cpu_s={"gateway": 6.0, "postgres": 1.0, "valkey": 0.25})
    idling = used(beats=0, cpu_s={"gateway": 1.0, "postgres": 0.0, "valkey": 0.0})
    found = figures(1000, 4, before, [beating], [idling])
    assert (found.beats_per_s, found.gateway_share, found.postgres_share) == (50.0, pytest.approx(10.0), 2.0)
    assert (found.valkey_share, found.view_share) == (0.5, pytest.approx(0.05))
