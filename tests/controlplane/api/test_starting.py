"""Requests for a model whose instance is starting wait for it, within a limit; others are refused at once."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx2 as httpx
import pytest

from controlplane.policies.lifecycle import InstanceState
from controlplane.store.fleet import touch_node
from controlplane.store.tables import Instance
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import KV_BYTES, MODEL, PATIENCE_S, FakeAgent, World, served, until

NOBODY = "http://127.0.0.1:9"


def report(world: World, node: str, instance_id: str, state: str, url: str) -> None:
    seen = InstanceReport(
        instance_id=instance_id,
        model=MODEL,
        slot=0,
        state=state,
        kv_capacity_bytes=KV_BYTES,  # type: ignore[arg-type]
    )
    beat = Heartbeat(node=node, boot_id="b", generation=0, instances=(seen,))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800", url=url)


def answer_while(gateway: Gateway, then: Callable[[], None]) -> httpx.Response:
    """The answer to a chat request that has to wait until `then` was done."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(gateway.chat()))
    asking.start()
    until(lambda: "tidepool_streams 1.0" in gateway.http.get("/metrics").text)
    assert answers == []
    then()
    asking.join(timeout=PATIENCE_S)
    return answers[0]


def test_a_request_waits_for_an_instance_that_loads(world: World) -> None:
    agent = FakeAgent()
    with served(agent.app) as url, running_gateway(world, request_start_wait_s=PATIENCE_S) as gateway:
        world.join("n1", url=url)
        made = world.place("n1")
        report(world, "n1", made, "loading", url)
        until(lambda: gateway.state.fleet.is_starting(MODEL, PATIENCE_S))
        answer = answer_while(gateway, lambda: report(world, "n1", made, "ready", url))
        assert "turns" in answer.text


@pytest.mark.parametrize("way", ["not reached", "not ready"])
def test_a_request_waits_for_a_node_that_restarts(world: World, way: str) -> None:
    """The view still says ready; nobody listens there, or the instance is being loaded again."""
    agent = FakeAgent(then="not ready" if way == "not ready" else "answer")
    with served(agent.app) as url, running_gateway(world, request_start_wait_s=PATIENCE_S) as gateway:
        before = url if way == "not ready" else NOBODY
        world.join("n1", url=before)
        made = world.place("n1")
        report(world, "n1", made, "ready", before)
        until(lambda: gateway.state.fleet.is_starting(MODEL, PATIENCE_S))

        def back() -> None:
            agent.then = "answer"
            report(world, "n1", made, "ready", url)

        assert "turns" in answer_while(gateway, back).text


def test_the_wait_has_a_limit_and_says_why(world: World) -> None:
    with running_gateway(world, request_start_wait_s=0.5) as gateway:
        world.join("n1")
        report(world, "n1", world.place("n1"), "loading", NOBODY)
        until(lambda: gateway.state.fleet.is_starting(MODEL, PATIENCE_S))
        error = gateway.chat(503).json()["error"]
        assert (error["code"], error["message"]) == ("no_capacity", f"no instance of '{MODEL}' is ready yet")
        text = gateway.http.get("/metrics").text
        assert f'tidepool_refusals_total{{model="{MODEL}",reason="no_capacity",tier="IW-N"}} 1.0' in text
        assert f'tidepool_slo_requests_total{{met="false",model="{MODEL}",tier="IW-N"}} 1.0' in text


def test_a_request_waits_for_an_instance_that_no_node_has_reported_yet(world: World) -> None:
    """The gateway has been up for long. An instance that `/admin/instances` calls ready is not refused either."""
    agent = FakeAgent()
    with served(agent.app) as url, running_gateway(world, request_start_wait_s=PATIENCE_S) as gateway:
        gateway.state.fleet._made_s -= 20 * PATIENCE_S
        world.join("n1", url=url)
        assert not gateway.state.fleet.is_starting(MODEL, PATIENCE_S)
        made = world.place("n1")
        with world.database.transaction() as session:
            touch_node(session, "n1")
        until(lambda: gateway.state.fleet.is_starting(MODEL, PATIENCE_S))
        assert gateway.state.fleet.state_of(MODEL) == "starting"
        answer = answer_while(gateway, lambda: report(world, "n1", made, "ready", url))
        assert "turns" in answer.text


def test_a_gateway_that_has_just_started_waits_for_the_first_heartbeats(world: World) -> None:
    agent = FakeAgent()
    with served(agent.app) as url, running_gateway(world, request_start_wait_s=PATIENCE_S) as gateway:
        world.join("n1", url=url)
        made = world.place("n1")
        answer = answer_while(gateway, lambda: report(world, "n1", made, "ready", url))
        assert "turns" in answer.text


@pytest.mark.parametrize("state", ["nowhere", "failed", "on a silent node"])
def test_what_is_not_on_its_way_is_not_waited_for(world: World, state: str) -> None:
    """The wait would outlast the test."""
    with running_gateway(world, request_start_wait_s=10 * PATIENCE_S) as gateway:
        gateway.state.fleet._made_s -= 20 * PATIENCE_S
        if state == "failed":
            world.join("n1")
            made = world.place("n1")
            with world.database.transaction() as session:
                session.get_one(Instance, made).observed = InstanceState.FAILED
            report(world, "n1", made, "failed", NOBODY)
            until(lambda: gateway.state.fleet.instances(MODEL))
        if state == "on a silent node":
            world.join("n1")
            world.place("n1")
            with world.database.transaction() as session:
                touch_node(session, "n1").last_seen_at = datetime.now(UTC) - timedelta(hours=1)
        gateway.state.fleet._read_catalog()
        assert gateway.chat(503).json()["error"]["code"] == "no_capacity"


def test_a_node_that_worked_on_it_is_not_asked_again(world: World) -> None:
    agent = FakeAgent(then="worker lost")
    with running_gateway(world, agent, request_start_wait_s=10 * PATIENCE_S) as gateway:
        gateway.chat(503)
        assert len(agent.asked) == 1


def test_after_one_that_worked_on_it_others_that_did_nothing_are_no_attempts(world: World) -> None:
    agent = FakeAgent("worker lost", "not ready", "not ready")
    with (
        served(agent.app) as url,
        running_gateway(world, request_attempts_max=3, request_start_wait_s=PATIENCE_S) as gateway,
    ):
        for node in ("n1", "n2", "n3", "n4"):
            world.join(node, url=url)
            report(world, node, world.place(node), "ready", url)
        until(lambda: len(gateway.state.fleet.instances(MODEL)) == 4)
        assert "turns" in gateway.chat().text
    assert len(agent.asked) == 4


def test_a_node_that_refuses_the_key_is_not_waited_for(world: World) -> None:
    """The wait would outlast the test."""
    agent = FakeAgent(then="wrong key")
    with running_gateway(world, agent, request_start_wait_s=10 * PATIENCE_S) as gateway:
        assert gateway.chat(502).json()["error"]["code"] == "invalid_node_key"
        assert len(agent.asked) == 1
