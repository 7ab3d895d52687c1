"""Tiers at the gateway: refused in time, held in line, measured against their objectives."""

import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from controlplane.api.metrics import Metrics
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.limits import Limit
from controlplane.serving.admission import AdmissionController
from controlplane.serving.in_flight import InFlightRequest
from controlplane.store.tables import Model
from dataplane.protocol.messages import Finished, Generate, Heartbeat, InstanceReport, StreamEvent
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import HANGS_S, KV_BYTES, PATIENCE_S, FakeAgent, World, until


def report(world: World, gateway: Gateway, **changes: Any) -> None:
    """Let the first node report its instance otherwise, and wait until the gateway knows."""
    node = world.live.read_view().nodes["n0"]
    seen: InstanceReport = msgspec.structs.replace(node.heartbeat.instances[0], **changes)
    beat = Heartbeat(node="n0", boot_id="b", generation=0, instances=(seen,))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800", url=node.url)

    def known() -> bool:
        said = gateway.state.fleet.instances()[0]
        return (said.kv_used_bytes, said.prefill_wait_s) == (seen.kv_used_bytes, seen.prefill_wait_s)

    until(known)


def test_the_counters_that_alerts_read_begin_at_zero(world: World) -> None:
    """The first event of a counter that begins with it would be in no rate and no increase."""
    with running_gateway(world, FakeAgent()) as gateway:
        lines = gateway.http.get("/metrics").text.split("\n")
    model = 'model="tide"'
    for tier in ("IW-F", "IW-N"):
        for met in ("true", "false"):
            assert f'tidepool_slo_requests_total{{met="{met}",{model},tier="{tier}"}} 0.0' in lines
        for reason in ("busy", "no_capacity", "overloaded", "rate_limit_exceeded", "resource_unavailable"):
            assert f'tidepool_refusals_total{{{model},reason="{reason}",tier="{tier}"}} 0.0' in lines
    for limit in ("requests", "tokens", "concurrent"):
        assert f'tidepool_limit_refusals_total{{limit="{limit}"}} 0.0' in lines


def test_no_other_counters_of_a_model_begin_and_those_of_one_that_is_gone_end() -> None:
    metrics = Metrics()
    metrics.expect(["tide", "gone"])
    begun = [line for line in metrics.render().decode().split("\n") if "_total{" in line and 'model="gone"' in line]
    assert {line.split("{")[0] for line in begun} == {"tidepool_refusals_total", "tidepool_slo_requests_total"}
    assert not [line for line in begun if 'tier="NIW"' in line], "no alert reads those of deferred requests"
    metrics.series(metrics.refusals, "gone", "IW-F", "busy").inc()
    metrics.series(metrics.first_token_s, "gone", "IW-F").observe(1.0)
    metrics.series(metrics.alias_requests, "gone", "the-alias").inc()
    metrics.note_limit_refusal(Limit.TOKENS, model="gone", input_tokens=1)
    metrics.note_prompt("gone", "i1", Finished(finish_reason="stop", prompt_tokens=1, completion_tokens=1))
    metrics.expect(["tide"])
    text = metrics.render().decode()
    assert ('model="gone"' in text, 'model="tide"' in text) == (False, True)
    metrics.expect(["tide", "gone"])
    assert 'tidepool_refusals_total{model="gone",reason="busy",tier="IW-F"} 0.0' in metrics.render().decode()


def test_what_could_not_begin_in_time_is_refused(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        report(world, gateway, prefill_wait_s=40.0, prefill_urgent_wait_s=4.0, prefill_token_s=1e-4)
        refused = gateway.chat(429, service_tier="priority")
        assert refused.json()["error"]["code"] == "busy"
        assert refused.headers["retry-after"] == "3"
        gateway.chat(200, service_tier="default")
        report(world, gateway, prefill_wait_s=39.0, prefill_urgent_wait_s=0.0, prefill_token_s=1e-4)
        gateway.chat(200, service_tier="priority")
        assert (
            'tidepool_refusals_total{model="tide",reason="busy",tier="IW-F"} 1.0' in gateway.http.get("/metrics").text
        )


def test_a_model_has_its_own_objectives(world: World) -> None:
    with world.database.transaction() as session:
        session.get_one(Model, "tide").slo = {"IW-N": {"ttft_s": 2.0, "tbt_s": 0.1}}
    with running_gateway(world, FakeAgent()) as gateway:
        report(world, gateway, prefill_wait_s=4.0, prefill_token_s=1e-4)
        refused = gateway.chat(429, service_tier="default")
        assert refused.json()["error"]["code"] == "busy"
        assert refused.headers["retry-after"] == "3"


def test_flex_requests_wait_in_order_until_there_is_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admitted in order, and sent at once: which of their connections an agent reads first is another matter."""
    agent = FakeAgent()
    admitted: list[str | None] = []
    enter = AdmissionController.enter

    async def noted(self: AdmissionController, request: InFlightRequest) -> RoutingFacts:
        facts = await enter(self, request)
        admitted.append(request.message.prompt)
        return facts

    monkeypatch.setattr(AdmissionController, "enter", noted)
    with running_gateway(world, agent, used=0.65, flex_wait_s=PATIENCE_S, flex_waiting_max=3) as gateway:
        headers = {"Authorization": f"Bearer {gateway.secret}"}
        ended: list[int] = []

        def ask(number: int) -> None:
            body = {"model": "tide", "prompt": f"p{number}", "service_tier": "flex", "stream": number == 1}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
            ended.append(answer.status_code)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda number=number: gateway.state.admission.waiting == number + 1)
        gateway.chat(429, service_tier="flex")
        gateway.chat(200, service_tier="default")
        assert "tidepool_flex_waiting 3.0" in gateway.http.get("/metrics").text
        report(world, gateway, kv_used_bytes=int(0.1 * KV_BYTES))
        for thread in threads:
            thread.join()
        assert ended == [200] * 3
        assert [prompt for prompt in admitted if prompt] == ["p0", "p1", "p2"]
        assert sorted(asked.prompt for asked in agent.asked if asked.prompt) == ["p0", "p1", "p2"]
        until(lambda: gateway.state.admission.waiting == 0)


def test_a_flex_client_that_goes_away_leaves_the_line(world: World) -> None:
    with running_gateway(world, FakeAgent(), used=0.65, flex_wait_s=HANGS_S) as gateway:
        body = msgspec.json.encode({"model": "tide", "prompt": "x", "service_tier": "flex"})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {gateway.secret}\r\n"
        sized = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        address = httpx.URL(gateway.url)
        with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as client:
            client.sendall((head + sized).encode() + body)
            until(lambda: gateway.state.admission.waiting == 1)
        until(lambda: gateway.state.admission.waiting == 0)


class Timed(FakeAgent):
    """Time goes by nowhere but in its slow answers: half a second before the first token."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def _events(self, mode: str, generate: Generate) -> AsyncIterator[StreamEvent]:
        self.now_s += 0.5 if mode == "slow" else 0.0
        async for event in super()._events("answer", generate):
            yield event


def test_attainment_is_counted_by_token_and_by_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.database.transaction() as session:
        session.get_one(Model, "tide").slo = {"IW-F": {"ttft_s": 0.2, "tbt_s": 5.0}}
    agent = Timed("answer", "slow", "too long", "worker lost", "worker lost")
    for module in ("attainment", "answering"):
        monkeypatch.setattr(f"controlplane.api.openai.{module}.time", agent)
    with running_gateway(world, agent, request_attempts_max=1) as gateway:
        gateway.chat(200, service_tier="priority")
        gateway.chat(200, service_tier="priority")
        gateway.chat(400, service_tier="priority")
        gateway.chat(503, service_tier="priority")
        gateway.chat(503)
        text = gateway.http.get("/metrics").text
    model = 'model="tide"'
    assert f'tidepool_slo_requests_total{{met="true",{model},tier="IW-F"}} 1.0' in text
    assert f'tidepool_slo_requests_total{{met="false",{model},tier="IW-F"}} 2.0' in text
    assert f'tidepool_slo_requests_total{{met="true",{model},tier="IW-N"}} 0.0' in text, "so that a share is known"
    assert f'tidepool_slo_requests_total{{met="false",{model},tier="IW-N"}} 1.0' in text
    assert f'tidepool_slo_violations_total{{{model},objective="ttft",tier="IW-F"}} 1.0' in text
    assert f'tidepool_slo_violations_total{{{model},objective="failed",tier="IW-F"}} 1.0' in text
    assert f'tidepool_slo_tokens_total{{met="false",{model},tier="IW-F"}} 1.0' in text
    assert f'tidepool_slo_tokens_total{{met="true",{model},tier="IW-F"}} 5.0' in text
    assert 'gen_ai_server_request_duration_seconds_count{model="tide",tier="IW-F"} 2.0' in text
