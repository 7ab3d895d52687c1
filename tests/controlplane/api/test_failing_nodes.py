"""The interactive gateway before nodes that refuse, die, hang or babble."""

import threading

import httpx2 as httpx
import msgspec
import openai
import pytest

from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import PATIENCE_S, FakeAgent, World, until

BEFORE_THE_FIRST_TOKEN = [
    "die", "garbage", "empty", "not ready", "overloaded", "wrong key", "worker lost", "odd status", "bad bytes", "hang",
]  # fmt: skip


def test_another_instance_is_tried_before_the_first_token(world: World) -> None:
    bad, good = FakeAgent(), FakeAgent()
    with running_gateway(world, bad, good, circuit_open_max_s=0.0) as gateway:
        gateway.give_up_soon(bad)
        for stream in (False, True):
            for mode in BEFORE_THE_FIRST_TOKEN:
                bad.script = [mode]
                answer = gateway.chat(stream=stream)
                assert "turns" in answer.text, mode
                assert answer.headers["x-tidepool-region"] == "us-west", mode
                assert len(bad.asked) == len(good.asked), mode


def test_what_is_the_clients_fault_is_not_tried_again(world: World) -> None:
    first, second = FakeAgent("too long"), FakeAgent()
    with running_gateway(world, first, second) as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            gateway.client.chat.completions.create(model="tide", messages=[{"role": "user", "content": "hi"}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
        assert second.asked == []


@pytest.mark.parametrize("stream", [False, True])
def test_when_every_node_fails_the_answer_is_ours(world: World, stream: bool) -> None:
    rows = [("die", 502), ("garbage", 502), ("wrong key", 502), ("odd status", 502), ("not ready", 503),
            ("overloaded", 429), ("worker lost", 503)]  # fmt: skip
    first, second = FakeAgent(), FakeAgent()
    with running_gateway(world, first, second) as gateway:
        for mode, status in rows:
            first.then = second.then = mode
            gateway.chat(status, stream=stream)
        assert len(first.asked) == len(second.asked) == len(rows)


def test_codes_that_a_node_makes_up_share_a_label(world: World) -> None:
    """Each value of a label is a series for ever."""
    with running_gateway(world, FakeAgent(then="made up")) as gateway:
        assert gateway.chat(429).json()["error"]["code"] == "made up"
        found = gateway.http.get("/metrics").text
    assert 'outcome="other"' in found
    assert 'reason="other"' in found
    assert "made up" not in found


def test_at_most_three_instances_are_tried(world: World) -> None:
    agents = [FakeAgent(then="worker lost") for _ in range(4)]
    with running_gateway(world, *agents) as gateway:
        gateway.chat(503)
    assert sum(len(agent.asked) for agent in agents) == 3


def test_no_instance_and_a_dead_one(world: World) -> None:
    with running_gateway(world) as gateway:
        assert gateway.chat(503).json()["error"]["code"] == "no_capacity"
        world.serve("gone", "http://127.0.0.1:9")
        until(lambda: _code(gateway.http) != "no_capacity")
        assert _code(gateway.http) == "node_error"


def _code(http: httpx.Client) -> str:
    answer = http.post("/v1/completions", json={"model": "tide", "prompt": "x"})
    return str(answer.json()["error"]["code"])


LATER = ["die later", "fail later", "no finish", "hang later"]


@pytest.mark.parametrize("mode", LATER)
def test_a_node_lost_in_mid_stream_is_not_noticed(world: World, mode: str) -> None:
    first, second = FakeAgent(then=mode), FakeAgent()
    with running_gateway(world, first, second) as gateway:
        gateway.give_up_soon(first)
        answer = gateway.chat(stream=True, stream_options={"include_usage": True})
        assert [piece for piece in ("the tide ", "turns") if answer.text.count(f'"{piece}"') == 1] == [
            "the tide ",
            "turns",
        ]
        assert '"completion_tokens":3' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert gateway.chat().json()["choices"][0]["message"]["content"] == "the tide turns"
        assert gateway.client.completions.create(model="tide", prompt="x").choices[0].text == "the tide turns"
        assert [asked.generated for asked in second.asked] == [(1, 2)] * 3
        assert [asked.sampling for asked in second.asked] == [asked.sampling for asked in first.asked]
        assert 'tidepool_continuations_total{model="tide",tier="IW-N"} 3.0' in gateway.http.get("/metrics").text


@pytest.mark.parametrize("mode", LATER)
def test_a_failure_in_mid_stream(world: World, mode: str) -> None:
    """Where nobody can carry it on, a stream says so in its last event; a whole answer becomes an error."""
    agent = FakeAgent(then=mode)
    with running_gateway(world, agent, stream_continue_wait_s=0.0) as gateway:
        gateway.give_up_soon(agent)
        events = [line for line in gateway.chat(stream=True).text.split("\n\n") if line]
        assert '"the tide "' in events[1]
        error = msgspec.json.decode(events[-1].removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not any("[DONE]" in event for event in events)
        with pytest.raises(openai.APIError):
            list(gateway.client.completions.create(model="tide", prompt="x", stream=True))
        gateway.chat(503 if mode == "fail later" else 502)


@pytest.mark.parametrize(
    ("stream", "mode"), [(True, "hang later"), (True, "hang"), (False, "hang"), (False, "hang later")]
)
def test_a_client_that_goes_away_reaches_the_node(world: World, stream: bool, mode: str) -> None:
    agent = FakeAgent(then=mode)
    with running_gateway(world, agent) as gateway:
        body = {"model": "tide", "prompt": "x", "stream": stream}
        while not agent.asked:  # a slow machine may need longer than that to reach the node
            with pytest.raises(httpx.TimeoutException):
                gateway.http.post("/v1/completions", json=body, timeout=0.5)
        assert agent.dropped.wait(PATIENCE_S)
        until(lambda: "tidepool_streams 0.0" in gateway.http.get("/metrics").text)
        until(lambda: 'outcome="cancelled"' in gateway.http.get("/metrics").text)


def test_a_gateway_that_drains_finishes_what_arrived_and_its_probe_says_no(world: World) -> None:
    """A request that arrives between SIGTERM and the port's end is served: an upgrade shows no client a 5xx."""
    agent = FakeAgent(then="held")
    with running_gateway(world, agent) as gateway:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(gateway.chat(stream=True).text))
        thread.start()
        until(lambda: agent.asked)
        gateway.state.draining = True
        late = threading.Thread(target=lambda: texts.append(gateway.chat(stream=True).text))
        late.start()
        until(lambda: len(agent.asked) == 2)
        assert gateway.http.get("/readyz").json()["missing"] == ["draining"]
        agent.freed.set()
        thread.join()
        late.join()
        assert [text.endswith("[DONE]\n\n") for text in texts] == [True, True]


def test_connections_to_nodes_are_used_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_IDLE_CONNECTION_S", "_END_TIMEOUT_S"):
        monkeypatch.setattr(f"controlplane.serving.node_connections.{limit}", PATIENCE_S)
    agent = FakeAgent()
    with running_gateway(world, agent) as gateway:
        for stream in (False, False, True, True):
            gateway.chat(stream=stream)
            until(lambda: "tidepool_streams 0.0" in gateway.http.get("/metrics").text)
        assert len(agent.peers) == 1
