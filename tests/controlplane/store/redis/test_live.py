"""The live view, demand counters and release windows in Redis."""

import time
from collections.abc import Callable, Mapping

import msgspec
import pytest
from pydantic import SecretStr
from redis import Redis

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint, Window
from controlplane.settings import Settings
from controlplane.store.redis.live import EMPTY_VIEW, LiveStore, Sums, WindowTaken, instance_facts
from controlplane.store.tables import Model
from ops.local.ports import free_port
from tests.controlplane.world import PATIENCE_S, World, until

EAST = Endpoint(model="org/tide", region="us-east")


def test_the_view_and_its_ages(world: World) -> None:
    assert world.live.read_view().nodes == {}
    world.report("n1", "i1", region="us-east", url="http://n1", used=0.25)
    world.report("n2", "i2", region="us-west", url="http://n2")
    world.report("n1", "i3", region="us-east", url="http://n1", used=0.5, context_tokens=512)
    view = world.live.read_view()
    assert {name: (node.region, node.url) for name, node in view.nodes.items()} == {
        "n1": ("us-east", "http://n1"),
        "n2": ("us-west", "http://n2"),
    }
    models = {"tide": Model(name="tide", kv_bytes_per_token=3)}
    sent = {"i3": Sums(8, 5, 1), "i2": Sums()}
    facts = {f.instance_id: f for f in instance_facts(view, models=models, sent=sent.__getitem__)}
    assert instance_facts(view, model="other") == ()
    assert {f.instance_id for f in instance_facts(view, model="tide")} == set(facts)
    assert set(facts) == {"i2", "i3"}, "a heartbeat replaces the one before"
    chosen = facts["i3"]
    assert (chosen.node_id, chosen.endpoint.region, chosen.accepting) == ("n1", "us-east", True)
    assert (chosen.kv_used_bytes / chosen.kv_capacity_bytes, chosen.sent_tokens, chosen.kv_bytes_per_token) == (
        0.5,
        8,
        3,
    )
    assert [facts[name].context_tokens for name in ("i2", "i3")] == [None, 512]
    assert 0 <= chosen.age_s < PATIENCE_S
    until(lambda: max(each.age_s for each in instance_facts(world.live.read_view())) > chosen.age_s)


def test_nodes_of_another_version_and_of_long_ago_are_forgotten(world: World, redis_client: Redis) -> None:
    world.report("n1", "i1", region="us-east", url="http://n1")
    redis_client.hset("tidepool:view", "n2", '{"version": 2}')
    assert set(world.live.read_view().nodes) == {"n1"}
    stored = msgspec.json.decode(str(redis_client.hget("tidepool:view", "n1")))
    stored["received_s"] -= 601
    redis_client.hset("tidepool:view", "n1", msgspec.json.encode(stored))
    assert world.live.read_view().nodes == {}
    assert redis_client.hlen("tidepool:view") == 0


def test_demand_adds_up_and_a_gap_is_not_zero(world: World, redis_client: Redis) -> None:
    assert world.live.read_demand(60) is None
    world.live.count_demand("a", {}, minute_s=60)
    assert world.live.read_demand(60) == []
    redis_client.hset("tidepool:demand:120", "IW|org/tide|us-east", 5)  # by a process of the version before
    for process, tokens in (("a", 10.0), ("b", 20.0), ("a", 30.0), ("a", 30.0), ("a", 10.0)):
        world.live.count_demand(process, {("IW", EAST): tokens, ("NIW", EAST): 1.0}, minute_s=120)
    counted = {(c.kind, c.endpoint, c.start_s): c.tokens for c in world.live.read_demand(120) or []}
    assert counted == {("IW", EAST, 120): 5.0 + 20.0 + 30.0, ("NIW", EAST, 120): 2.0}
    assert 0 < int(str(redis_client.ttl("tidepool:demand:120"))) <= 7200
    assert 0 < int(str(redis_client.ttl("tidepool:counted:120"))) <= 600


def test_a_window_is_shared_by_all_dispatchers(world: World, redis_client: Redis) -> None:
    west = Endpoint(model="org/tide", region="us-west")
    new, grown = Window(requests=10, stepped_s=1795459275.3208504), Window(requests=20.0, stepped_s=1795459275.3208506)

    def take(dispatcher: str, before: Window | None, after: Window, *, fresh_s: float = 60, **counts: int) -> int:
        taken = WindowTaken(before=before, after=after, **({"in_flight": 0} | counts))
        return world.live.take_windows(dispatcher, {EAST: taken}, fresh_s=fresh_s)[EAST]

    assert world.live.read_windows([EAST, west])[1] == {}
    assert take("a", None, new, wanted=7) == 7
    assert take("b", new, grown, wanted=7, urgent=2, in_flight=1) == 7, "20 - 7 - 1 - 2 = 10"
    assert world.live.read_windows([EAST, west])[1] == {EAST: grown}
    assert take("a", new, Window(requests=99.0), wanted=9, in_flight=6) == 20 - 6 - 10, "the other one has stepped it"
    assert world.live.read_windows([EAST])[1] == {EAST: grown}
    assert world.live.count_in_flight("a", {EAST: 3, west: 4}, fresh_s=60) == {EAST: 3 + 10, west: 4}
    assert take("a", grown, new, wanted=1, in_flight=30) == 0
    assert world.live.count_in_flight("c", {EAST: 0}, fresh_s=60) == {EAST: 40}
    assert take("c", new, new, wanted=20, fresh_s=0) == 10, "dispatchers that are gone count no more"
    redis_client.hset("tidepool:release:org/tide|us-east", "window", "of another version")
    assert world.live.read_windows([EAST])[1] == {}
    assert take("c", None, grown, wanted=9) == 9
    redis_client.flushdb()
    assert world.live.read_windows([EAST])[1] == {}
    assert take("c", grown, new, wanted=9, in_flight=4) == 6, "lost with Redis, begun anew"
    assert 0 < int(str(redis_client.ttl("tidepool:release:org/tide|us-east"))) <= 600


def test_processes_hear_what_the_others_have_sent_in_the_last_seconds(world: World, redis_client: Redis) -> None:
    heard = dict.fromkeys("abc", "0-0")

    def exchange(process: str, sent: dict[str, Sums], *, late_s: float = 0.0) -> list[Mapping[str, Sums]]:
        now_s = redis_now_s(redis_client) + late_s
        heard[process], told = world.live.exchange_sent(process, sent, after=heard[process], now_s=now_s)
        assert all(now_s - late_s - PATIENCE_S < each.at_s <= now_s - late_s + PATIENCE_S for each in told)
        return [each.instances for each in told]

    assert exchange("a", {}) == []
    assert exchange("a", {"i1": Sums(30, 20, 2)}) == [], "nobody hears of itself"
    assert exchange("b", {"i2": Sums(-5, -5, -1)}) == [{"i1": Sums(30, 20, 2)}]
    assert exchange("a", {}) == [{"i2": Sums(-5, -5, -1)}]
    assert exchange("a", {}) == exchange("b", {}) == [], "once each"
    redis_client.xadd("tidepool:sent", {"z": "of another version"})
    assert exchange("a", {"i3": Sums(1, 1, 1)}) == []
    assert exchange("b", {}) == [{"i3": Sums(1, 1, 1)}]
    assert exchange("c", {}, late_s=60) == [], "what is old has been reported since"
    redis_client.flushdb()
    time.sleep(0.002)  # entries are numbered by the millisecond
    assert exchange("b", {"i1": Sums(1, 1, 1)}) == []
    assert exchange("a", {}) == [{"i1": Sums(1, 1, 1)}], "lost with Redis, begun anew"


def redis_now_s(client: Redis) -> float:
    seconds, micros = client.time()
    return float(seconds + micros / 1e6)


def test_an_absent_redis_is_said_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("redis.retry.sleep")  # it is not waited for
    gone = settings.model_copy(update={"redis_url": SecretStr(f"redis://127.0.0.1:{free_port()}/0")})
    live = LiveStore(gone)
    calls: list[Callable[[], object]] = [
        live.ping,
        live.read_view,
        lambda: live.read_demand(0),
        lambda: live.count_demand("a", {}, minute_s=0),
        lambda: live.read_windows([EAST]),
        lambda: live.count_in_flight("a", {EAST: 1}, fresh_s=1),
        lambda: live.exchange_sent("a", {}, after="0-0", now_s=0),
    ]
    for call in calls:
        with pytest.raises(UnavailableError):
            call()
    live.close()
    assert instance_facts(EMPTY_VIEW) == ()
