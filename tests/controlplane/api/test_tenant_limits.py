"""Limits of a tenant at the gateways: counted together, said in headers, and kept alone while Redis is away."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import SecretStr

from controlplane.api.metrics import Metrics
from controlplane.api.tenant_limits import LimitKeeper
from controlplane.api.token_budgets import TokenBudgets
from controlplane.errors import UnavailableError
from controlplane.policies.limits import TenantLimits
from controlplane.store.keys import KeyScope, make_key
from controlplane.store.redis.limits import Charge, LimitStore
from controlplane.store.tables import Role
from controlplane.store.tenants import Tenant, put_tenant
from ops.cli.tenants import LIMITS
from ops.local.ports import free_port
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import PATIENCE_S, FakeAgent, World, until

pytestmark = pytest.mark.usefixtures("redis_clock")


def limit(world: World, **limits: int) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", **limits))


@contextmanager
def streaming(gateway: Gateway) -> Iterator[httpx.Response]:
    body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        yield answer


def test_requests_of_both_gateways_count(world: World) -> None:
    limit(world, requests_per_minute=3)
    with running_gateway(world, FakeAgent()) as one, running_gateway(world) as other:
        left = []
        for gateway, stream in ((one, False), (other, True), (one, True)):
            answer = gateway.chat(stream=stream)
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-reset-requests"] == f"{20 * (len(left) + 1)}.000s"
            assert "x-ratelimit-limit-tokens" not in answer.headers
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [2, 1, 0]
        for gateway in (one, other):
            refused = gateway.chat(429)
            error = assert_error(refused)
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert "3 requests per minute" in error["message"]
            assert refused.headers["retry-after"] == "20"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 'tidepool_limit_refusals_total{limit="requests"} 1.0' in one.http.get("/metrics").text
        stranger = one.client_of(world.key(tenant="other"))
        assert stranger.chat.completions.create(model="tide", messages=[{"role": "user", "content": "hi"}]).choices


def test_uploads_and_new_batches_are_requests_of_their_tenant(world: World) -> None:
    limit(world, requests_per_minute=3, tokens_per_minute=1, concurrent_max=1)
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tide", "prompt": "x"}}\n'
    upload = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", line)}}
    with running_gateway(world) as gateway:
        stored = gateway.http.post("/v1/files", **upload)
        assert stored.status_code == 200, stored.text
        assert stored.headers["x-ratelimit-remaining-requests"] == "2"
        assert "x-ratelimit-limit-tokens" not in stored.headers, "it takes none of a model's tokens"
        batch = {"input_file_id": stored.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = gateway.http.post("/v1/batches", json=batch)
        assert (made.status_code, made.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        assert gateway.http.post("/v1/files", **upload).status_code == 200
        for refused in (gateway.http.post("/v1/files", **upload), gateway.http.post("/v1/batches", json=batch)):
            assert refused.status_code == 429, refused.text
            error = assert_error(refused)
            assert (error["code"], refused.headers["retry-after"]) == ("rate_limit_exceeded", "20")
            assert "3 requests per minute" in error["message"]
        assert [file.id for file in gateway.client.files.list().data][-1] == stored.json()["id"], (
            "reads are not limited"
        )
        assert gateway.client.batches.cancel(made.json()["id"]).id == made.json()["id"]
        assert gateway.http.delete(f"/v1/files/{stored.json()['id']}").status_code == 200
        assert 'tidepool_limit_refusals_total{limit="requests"} 2.0' in gateway.http.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_what_a_key_may_not_do_is_no_request_of_its_tenant(world: World, path: str) -> None:
    limit(world, requests_per_minute=1)
    with world.database.transaction() as session:
        scoped = make_key(session, name="m", role=Role.CLIENT, tenant="acme", scopes=[KeyScope.MODELS]).secret
    with running_gateway(world, FakeAgent()) as gateway:
        for secret in (world.key(Role.VIEWER), scoped):
            refused = gateway.http.post(path, json={}, headers={"authorization": f"Bearer {secret}"})
            assert refused.status_code == 403, refused.text
        assert gateway.chat().headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_are_charged_by_guess_and_corrected(world: World) -> None:
    limit(world, tokens_per_minute=2000)
    with running_gateway(world, FakeAgent()) as gateway:
        first = gateway.chat(max_tokens=1500)
        assert first.headers["x-ratelimit-remaining-tokens"] == "499"
        second = gateway.chat(max_tokens=1500)
        assert second.headers["x-ratelimit-remaining-tokens"] == "489", "7 + 3 tokens were used, not 1501"
        error = assert_error(gateway.chat(400, max_tokens=2000))
        assert (error["code"], error["param"]) == ("invalid_value", "max_tokens")
        assert "2000 a minute" in error["message"]


def test_requests_at_once_count_until_they_end(world: World) -> None:
    limit(world, concurrent_max=2)
    agent = FakeAgent("hang later", "hang later")
    with running_gateway(world, agent) as one, running_gateway(world) as other:
        with streaming(one), streaming(other):
            error = assert_error(one.chat(429))
            assert "2 requests at once" in error["message"]
        until(lambda: _is_free(one))
        for gateway in (one, other) * 5:
            gateway.chat(stream=True)  # whoever has read [DONE] may ask again at once


def _is_free(gateway: Gateway) -> bool:
    body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]}
    return gateway.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("mode", ["worker lost", "fail later", "die later"])
def test_a_request_that_fails_counts_no_more(world: World, mode: str) -> None:
    limit(world, concurrent_max=1)
    agent = FakeAgent()
    with running_gateway(world, agent, request_attempts_max=1, stream_continue_wait_s=0.0) as gateway:
        for stream in (True, False):
            agent.script = [mode]
            body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            assert gateway.http.post("/v1/chat/completions", json=body).status_code in {200, 502, 503}
            until(lambda: _is_free(gateway))
        gateway.chat()


def test_what_no_node_took_costs_no_tokens(world: World) -> None:
    limit(world, tokens_per_minute=1000)
    agent = FakeAgent("worker lost")
    with running_gateway(world, agent, request_attempts_max=1) as gateway:
        assert gateway.chat(503, max_tokens=900).headers["x-ratelimit-limit-tokens"] == "1000", "refusals tell too"
        gateway.chat(max_tokens=900)


def test_leases_of_long_streams_are_renewed(world: World, redis_clock: RedisClock) -> None:
    limit(world, concurrent_max=1)
    agent = FakeAgent("hang later")
    with running_gateway(world, agent, limit_lease_s=3.0) as gateway, streaming(gateway):
        for _ in range(2):
            until(lambda: list(redis_clock.leases("acme").values()) == [3.0])
            assert "1 requests at once" in assert_error(gateway.chat(429))["message"]
            redis_clock.move(2)


def _cut_off(gateway: Gateway) -> None:
    """Its counts are nowhere to be reached; the live view is."""
    settings = gateway.world.settings.model_copy(
        update={"redis_url": SecretStr(f"redis://127.0.0.1:{free_port()}/0"), "limit_timeout_s": 0.2}
    )
    gateway.state.limits.store = LimitStore(settings)


def test_without_redis_a_gateway_keeps_its_share(world: World, capfd: Any) -> None:
    limit(world, requests_per_minute=4, concurrent_max=3)
    with running_gateway(world, FakeAgent()) as one, running_gateway(world, limit_lease_s=1.0) as other:
        until(lambda: other.state.limits._gateways == 2)
        real = other.state.limits.store
        _cut_off(other)
        for _ in range(2):
            assert other.chat().headers["x-ratelimit-limit-requests"] == "2"
        assert "2 requests per minute" in assert_error(other.chat(429))["message"]
        assert "tidepool_limits_local 1.0" in other.http.get("/metrics").text
        assert one.chat().headers["x-ratelimit-remaining-requests"] == "3"
        other.state.limits.store = real
        until(lambda: "tidepool_limits_local 0.0" in other.http.get("/metrics").text)
        assert other.chat().headers["x-ratelimit-limit-requests"] == "4"
    logged = capfd.readouterr().err
    assert logged.count("limits are counted by each gateway alone") == 1
    assert logged.count("limits are counted across gateways again") == 1


def test_a_renewal_that_succeeds_ends_counting_alone_at_once(world: World) -> None:
    limit(world, requests_per_minute=4)
    with running_gateway(world, FakeAgent(), limit_lease_s=3.0) as gateway:  # it is renewed every second
        keeper = gateway.state.limits
        keeper._note_away(UnavailableError("Redis does not answer"))
        keeper._away_until_s += 600.0
        until(lambda: "tidepool_limits_local 0.0" in gateway.http.get("/metrics").text)
        keeper._gateways = 4
        assert gateway.chat().headers["x-ratelimit-limit-requests"] == "4", "all of it, not a quarter"


def test_a_tenant_is_shown_set_and_reset(ask: Ask) -> None:
    shown = ask("GET", "/admin/tenants/acme")
    none = dict.fromkeys(LIMITS)
    assert (
        shown
        == {"name": "acme", "is_default": True, "queued_batch_tokens": 0, "shares": [], "tokens_reserved": {}} | none
    )
    ask("PUT", "/admin/tenants/acme", json={"requests_per_minute": 5}, role="operator", status=403)
    for bad in ({"requests_per_minute": 0}, {"tokens_per_minute": 1.5}, {"concurrent_max": -1}, {"x": 1},
                {"queued_batch_tokens_max": 2**63}):  # fmt: skip
        error = ask("PUT", "/admin/tenants/acme", json=bad, role="admin", status=400)
        assert error["param"] == next(iter(bad))
    ask("PUT", "/admin/tenants/A B", json={}, role="admin", status=400)
    put = ask("PUT", "/admin/tenants/acme", json={"requests_per_minute": 5, "queued_batch_tokens_max": 0}, role="admin")
    assert (
        ask("PUT", "/admin/tenants/acme", json={"requests_per_minute": 5, "queued_batch_tokens_max": 0}, role="admin")
        == put
    )
    assert (put["requests_per_minute"], put["tokens_per_minute"], put["queued_batch_tokens_max"]) == (5, None, 0)
    assert ask("GET", "/admin/tenants")["data"] == [put]
    assert ask("GET", "/admin/tenants/acme")["is_default"] is False
    assert ask("DELETE", "/admin/tenants/acme", role="admin") == shown
    assert ask("DELETE", "/admin/tenants/acme", role="admin") == shown
    events = [e for e in ask("GET", "/admin/audit", params={"limit": 10})["data"] if e["action"].startswith("tenant")]
    assert [(e["action"], e["subject"]) for e in events] == [("tenant.delete", "acme"), ("tenant.put", "acme")]
    assert events[0]["before"]["requests_per_minute"] == 5
    assert events[1]["before"] is None


def test_who_leaves_while_redis_is_asked_gets_no_tokens_back(world: World) -> None:
    async def run() -> set[float]:
        settings = world.settings.model_copy(update={"limit_timeout_s": PATIENCE_S})
        keeper = LimitKeeper(
            LimitStore(settings), Metrics(), settings, TokenBudgets(world.database, Metrics(), settings)
        )
        limits = TenantLimits(tokens_per_minute=1000, concurrent_max=5)

        def charge(name: str, tokens: int) -> Charge:
            return Charge(tenant="acme", limits=limits, tokens=tokens, lease=name)

        assert (await keeper._admit(charge("all", 1000)))[1].refused is None
        left = set()
        for turns in range(30):  # of the loop, until the client goes
            asking = asyncio.create_task(keeper._admit(charge(f"gone-{turns}", 900)))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            _, admission, _ = await keeper._admit(charge(f"next-{turns}", 999))
            assert admission.usage.tokens is not None
            left.add(admission.usage.tokens.level)
            assert admission.usage.running == 1, "whoever left holds nothing"
        await keeper.store.close()
        return left

    assert asyncio.run(run()) == {0.0}
