"""Demand is the load that clients offer: each request once, within its tenant's limits, served or not."""

from typing import Any

import pytest

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint
from controlplane.serving.demand_counter import DemandCounter
from controlplane.store.redis.live import LiveStore
from controlplane.store.tenants import Tenant, put_tenant
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import FakeAgent, World

RETRY = "x-stainless-retry-count"
"""What OpenAI's clients number their attempts with."""
PROMPT = "x" * 400
TOKENS = 101
EAST = Endpoint(model="tide", region="us-east")


def ask(gateway: Gateway, status: int, *, retry: int = 0, prompt: str = PROMPT, **changes: Any) -> None:
    answer = gateway.http.post(
        "/v1/completions", json={"model": "tide", "prompt": prompt} | changes, headers={RETRY: str(retry)}
    )
    assert answer.status_code == status, answer.text


def offered(gateway: Gateway, kind: str = "IW") -> float:
    """Input tokens counted so far."""
    gateway.state.demand.flush()
    live, total = gateway.world.live, 0.0
    for key in live._redis.scan_iter("tidepool:demand:*"):
        counts = live.read_demand(int(str(key).rsplit(":", 1)[1])) or []
        total += sum(count.tokens for count in counts if count.kind == kind)
    return total


@pytest.mark.usefixtures("redis_clock")
def test_what_a_tenant_may_not_send_is_no_demand_but_is_counted(world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=2, tokens_per_minute=2000))
    with running_gateway(world, FakeAgent()) as gateway:
        ask(gateway, 400, max_tokens=5000)
        ask(gateway, 200)
        ask(gateway, 200)
        for _ in range(3):
            ask(gateway, 429)
        assert offered(gateway) == 2 * TOKENS
        refused = f'tidepool_limit_refused_input_tokens_total{{limit="requests",model="tide"}} {3.0 * TOKENS}'
        assert refused in gateway.http.get("/metrics").text


def test_what_finds_no_room_is_demand_once_however_often_its_client_tries(world: World) -> None:
    with running_gateway(world) as gateway:
        for retry in range(3):
            ask(gateway, 503, retry=retry)
        assert offered(gateway) == TOKENS
        ask(gateway, 503)
        assert offered(gateway) == 2 * TOKENS, "the same once more is another request"
        ask(gateway, 503, prompt="y" * 400, retry=1)
        assert offered(gateway) == 3 * TOKENS, "its first attempt did not come to this gateway"


def test_attempts_on_several_nodes_are_one_request(world: World) -> None:
    with running_gateway(world, FakeAgent("die"), FakeAgent()) as gateway:
        ask(gateway, 200)
        assert offered(gateway) == TOKENS


def test_a_retry_of_what_the_tenant_might_not_send_is_counted_when_it_is_let_in(
    world: World, redis_clock: RedisClock
) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=1))
    with running_gateway(world, FakeAgent()) as gateway:
        ask(gateway, 200, prompt="y" * 40)
        ask(gateway, 429)
        redis_clock.move(60)
        ask(gateway, 200, retry=1)
        assert offered(gateway) == TOKENS + 11


@pytest.mark.parametrize("written", [True, False])
def test_a_write_of_unknown_end_is_repeated_and_counts_once(
    live: LiveStore, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    write, minute_s = live.count_demand, 1795459260
    counter, restarted = DemandCounter(live, gateway=True), DemandCounter(live, gateway=True)

    def lost(*args: Any, **named: Any) -> None:
        if written:
            write(*args, **named)
        raise UnavailableError("no answer came")

    monkeypatch.setattr("time.time", lambda: minute_s)
    monkeypatch.setattr(live, "count_demand", lost)
    for tokens in (30, 20):
        counter.count("IW", EAST, tokens)
        with pytest.raises(UnavailableError):
            counter.flush()
    monkeypatch.setattr(live, "count_demand", write)
    minute_s += 60
    restarted.count("IW", EAST, 7)
    for each in (counter, restarted, counter):
        each.flush()
    counts = [live.read_demand(at_s) or [] for at_s in (minute_s - 60, minute_s)]
    assert [[count.tokens for count in each] for each in counts] == [[50.0], [7.0]]


def test_flex_requests_count_as_deferred(world: World) -> None:
    with running_gateway(world, FakeAgent(), used=0.65, flex_wait_s=0.2) as gateway:
        for retry in (0, 1):
            ask(gateway, 429, retry=retry, service_tier="flex")
        assert (offered(gateway), offered(gateway, "NIW")) == (0.0, TOKENS)
