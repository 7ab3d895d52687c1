"""Who holds all threads that requests share, as a Postgres that hangs does, holds up no interactive request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio.to_thread
import msgspec
from fastapi.testclient import TestClient

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.tables import Role
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.world import HANGS_S, NODE_KEY, PATIENCE_S, FakeAgent, World, served, until


@contextmanager
def no_thread_left(api: TestClient) -> Iterator[None]:
    """All default threads of the app wait, until the block ends."""
    free, taken = threading.Event(), threading.Semaphore(0)
    ended: list[bool] = []

    def hold() -> None:
        taken.release()
        ended.append(free.wait(HANGS_S))

    assert api.portal is not None
    count = api.portal.call(lambda: int(anyio.to_thread.current_default_thread_limiter().total_tokens))
    holding = [api.portal.start_task_soon(anyio.to_thread.run_sync, hold) for _ in range(count)]
    for _ in range(count):
        assert taken.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        early = list(ended)
        free.set()
        for task in holding:
            task.result()
    assert not early, "the block waited for a thread"


def test_requests_and_heartbeats_go_on(world: World) -> None:
    agent = FakeAgent()
    settings = Settings(**world.settings.model_dump() | {"node_key": NODE_KEY, "heartbeat_stale_s": 600.0})
    client, node = ({"Authorization": f"Bearer {world.key(role)}"} for role in (Role.CLIENT, Role.NODE))
    chat = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]}
    with served(agent.app) as url, TestClient(make_app(settings)) as api:
        instance_id = world.serve("n0", url)
        until(api.app.state.tidepool.fleet.instances)  # type: ignore[attr-defined]
        with no_thread_left(api):
            report = InstanceReport(instance_id=instance_id, model="tide", slot=0, state="ready", kv_used_bytes=7)
            beat = Heartbeat(node="n0", boot_id="b", generation=0, instances=(report,))
            answer = api.post("/node/heartbeat", content=msgspec.json.encode(beat), headers=node)
            assert answer.status_code == 200, answer.text
            until(lambda: api.app.state.tidepool.fleet.instances()[0].kv_used_bytes == 7)  # type: ignore[attr-defined]
            answer = api.post("/v1/chat/completions", json=chat, headers=client)
            assert answer.status_code == 200, answer.text
