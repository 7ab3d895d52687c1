"""GET /admin/overview, the stream /admin/live and GET /admin/search."""

import asyncio
import contextlib
import itertools
import json

import httpx2 as httpx
import msgspec
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from controlplane.api.app import make_app
from controlplane.api.live_stream import LiveStream, events_of, pause_s
from controlplane.errors import AuthenticationError
from controlplane.settings import Settings
from controlplane.store.session import Database
from controlplane.store.tables import Desired
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.test_heartbeats import JOIN, hold
from tests.controlplane.world import PATIENCE_S, World, served


def test_gpus_are_counted_by_what_they_do(ask: Ask, world: World) -> None:
    world.join("east-1", slots=4)
    world.join("east-2", slots=3)
    world.join("west-1", region="us-west", slots=2)
    world.place("east-1", slot=0)
    world.place("east-1", slot=1, desired=Desired.SPOT)
    world.place("east-2", slot=1, desired=Desired.STOPPED)
    regions = {each["name"]: each["gpus"] for each in ask("GET", "/admin/overview", role="viewer")["regions"]}
    assert regions["us-east"] == {"dedicated": 1, "pooled": 0, "spot": 1, "free": 12, "lost": 0}, "slots of two GPUs"
    assert regions["us-west"] == {"dedicated": 0, "pooled": 0, "spot": 0, "free": 4, "lost": 0}


def test_gpus_of_a_silent_node_are_lost(ask: Ask, world: World, database: Database) -> None:
    world.join("east-1", slots=3)
    world.place("east-1", slot=0)
    with database.transaction() as session:
        session.connection().exec_driver_sql("UPDATE nodes SET last_seen_at = now() - interval '1 hour'")
    (region,) = [each for each in ask("GET", "/admin/overview")["regions"] if each["name"] == "us-east"]
    assert region["gpus"] == {"dedicated": 0, "pooled": 0, "spot": 0, "free": 0, "lost": 6}


def test_an_instance_and_its_adapters_count_once(ask: Ask, world: World, api: TestClient) -> None:
    """Each of them reports the load of all."""
    world.join("east-1")
    shared = {"slot": 0, "state": "ready", "kv_used_bytes": 80, "kv_capacity_bytes": 100}
    reports = [
        InstanceReport(instance_id="i1", model="tide", **shared),
        *(InstanceReport(instance_id=f"i1+{name}", model=name, host="i1", **shared) for name in ("a", "b")),
        InstanceReport(instance_id="i2", model="ebb", **(shared | {"slot": 1, "kv_used_bytes": 20})),
    ]
    beat = Heartbeat(node="east-1", boot_id="b", generation=0, instances=tuple(reports))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800", url="http://127.0.0.1:9")
    api.app.state.tidepool.fleet.read_view()  # type: ignore[attr-defined]
    (region,) = [each for each in ask("GET", "/admin/overview")["regions"] if each["name"] == "us-east"]
    assert region["utilization"] == 0.5


def test_the_overview_has_the_status_and_what_happened(ask: Ask, fleet: None, database: Database) -> None:
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(JOIN))
    hold(database, "i1")
    overview = ask("GET", "/admin/overview", role="viewer")
    assert overview["status"]["models"] == 2
    assert [each["name"] for each in overview["regions"]] == ["us-east", "us-west"]
    assert "i1" in [event["subject"] for event in overview["events"]]
    ask("GET", "/admin/overview", role="client", status=403)
    ask("GET", "/admin/live", role="client", status=403)


def test_the_stream_has_a_head_that_ends_and_a_body_that_goes_on(settings: Settings, secrets: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {secrets['viewer']}"}
    with served(make_app(settings)) as url:
        head = httpx.head(f"{url}/admin/live", headers=headers, timeout=PATIENCE_S)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")
        with httpx.stream("GET", f"{url}/admin/live", headers=headers, timeout=PATIENCE_S) as answer:
            named = (line for line in answer.iter_lines() if line.startswith("event: "))  # beats may come between them
            names = list(itertools.islice(named, 2))
    assert names == ["event: overview", "event: overview"]


class TestStream:
    """What many readers of one stream are sent."""

    def test_all_readers_share_what_is_read(self) -> None:
        reads = 0

        async def read() -> bytes:
            nonlocal reads
            reads += 1
            return b'{"read": %d}' % reads

        async def take(stream: LiveStream, count: int) -> list[int]:
            async with contextlib.aclosing(stream.follow()) as events:
                return [json.loads(event.split(b"data: ")[1])["read"] async for event, _ in _some(events, count)]

        async def main() -> None:
            stream = LiveStream(read, name="overview", every_s=0.05)
            async with asyncio.timeout(PATIENCE_S):
                taken = await asyncio.gather(*(take(stream, 3) for _ in range(50)))
            assert all(events == sorted(set(events)) for events in taken), "none twice, none backwards"
            assert reads <= max(map(max, taken)) + 1
            await asyncio.sleep(0.2)
            after = reads
            await asyncio.sleep(0.2)
            assert reads == after, "nobody reads: nothing is asked"

        asyncio.run(main())

    def test_events_that_are_dear_come_more_seldom_but_still_come(self) -> None:
        assert [pause_s(2.0, cpu_s) for cpu_s in (0.0, 0.016, 0.04, 60.0)] == pytest.approx([2.0, 2.0, 5.0, 10.0])
        assert pause_s(30.0, 60.0) == 30.0

    def test_it_says_when_a_server_is_away_and_goes_on(self) -> None:
        answers = iter([OperationalError("select", {}, Exception("gone")), b"{}"])

        async def read() -> bytes:
            answer = next(answers, b"{}")
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def main() -> list[bytes]:
            stream = LiveStream(read, name="overview", every_s=0.05)
            async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(stream.follow()) as events:
                return [event async for event, _ in _some(events, 2)]

        assert asyncio.run(main()) == [b"event: away\ndata: {}\n\n", b"event: overview\ndata: {}\n\n"]

    def test_it_ends_with_the_right_to_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("controlplane.api.live_stream._BEAT_S", 0.01)
        asked = 0

        async def may_go_on() -> None:
            nonlocal asked
            asked += 1
            if asked == 3:
                raise AuthenticationError("revoked")

        async def read() -> bytes:
            return b"{}"

        async def main() -> int:
            stream = LiveStream(read, name="overview", every_s=0.02)
            async with asyncio.timeout(PATIENCE_S):
                return len([event async for event in events_of(stream, may_go_on)])

        assert asyncio.run(main()) >= 2
        assert asked == 3


async def _some(events, count: int):
    async for event in events:
        yield event, count
        count -= 1
        if count == 0:
            return


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("LLA", [("model", "llama")]),
        ("us-", [("region", "us-east"), ("region", "us-west")]),
        ("qwen3", [("model", "Qwen/Qwen3-8B")]),
        ("%", []),
        ("_", []),
        ("acme", [("tenant", "acme")]),
    ],
)
def test_things_are_found_by_a_part_of_their_name(ask: Ask, fleet: None, words: str, found: list[object]) -> None:
    ask("PUT", "/admin/tenants/acme", role="admin", json={})
    answer = ask("GET", "/admin/search", role="viewer", params={"words": words})
    assert [(each["kind"], each["name"]) for each in answer["data"]] == found


def test_a_search_has_limits(ask: Ask, api: TestClient) -> None:
    for words in ("", "x" * 201, "\0"):
        assert ask("GET", "/admin/search", params={"words": words}, status=400)["param"] == "words"
