"""Routing by prefix at a gateway: conversations return to their instance, tenants share nothing, hits are counted."""

from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World

LONG = "The harbour master wrote down the height of every tide. " * 40


@pytest.fixture
def agents() -> list[FakeAgent]:
    return [FakeAgent(), FakeAgent()]


@pytest.fixture
def gateway(world: World, agents: list[FakeAgent]) -> Iterator[Gateway]:
    with running_gateway(world, *agents) as gateway:
        yield gateway


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


def test_a_conversation_returns_to_its_instance(gateway: Gateway, agents: list[FakeAgent]) -> None:
    east, west = agents
    at_west: Any = {"extra_headers": {"x-tidepool-region": "us-west"}}
    create = gateway.client.chat.completions.create
    create(model="tide", messages=said(LONG), **at_west)  # type: ignore[call-overload]
    assert (len(east.asked), len(west.asked)) == (0, 1)
    create(model="tide", messages=said(LONG, "Why?", "So that the ships could leave."))  # type: ignore[call-overload]
    assert (len(east.asked), len(west.asked)) == (0, 2), "it returns, though it now comes from us-east"
    create(model="tide", messages=said("Another one. " + LONG))  # type: ignore[call-overload]
    assert (len(east.asked), len(west.asked)) == (1, 2), "others go to their own region"


def test_tenants_share_no_prefix_unless_they_are_told_to(world: World, agents: list[FakeAgent]) -> None:
    salts: dict[bool, list[str]] = {}
    for shared in (False, True):
        agent = FakeAgent()
        with running_gateway(world, agent, prefix_cache_shared=shared) as gateway:
            secrets = [world.key(Role.CLIENT, tenant) for tenant in ("acme", "acme", "other")]
            for secret in secrets:
                for body in ({}, {"extra_body": {"cache_salt": "pepper"}}):
                    gateway.client_of(secret).completions.create(model="tide", prompt=LONG, **body)  # type: ignore[call-overload]
        salts[shared] = [asked.cache_salt for asked in agent.asked]
    mine, peppered, again, peppered_again, others, others_peppered = salts[False]
    assert (mine, peppered) == (again, peppered_again)
    assert len({mine, peppered, others, others_peppered}) == 4
    assert "" not in salts[False]
    assert salts[True][0::2] == ["", "", ""]
    assert len(set(salts[True][1::2])) == 1
    assert salts[True][1]


def test_hits_are_counted_by_model_and_by_instance(gateway: Gateway, agents: list[FakeAgent]) -> None:
    gateway.client.completions.create(model="tide", prompt="hi")
    agents[0].cached_tokens = 5
    gateway.client.completions.create(model="tide", prompt="hi")
    lines = gateway.http.get("/metrics").text.splitlines()
    assert 'tidepool_input_tokens_total{model="tide",tier="IW-N"} 14.0' in lines
    assert 'tidepool_cached_input_tokens_total{model="tide",tier="IW-N"} 5.0' in lines
    instance = agents[0].asked[0].instance_id
    assert f'tidepool_instance_input_tokens_total{{instance="{instance}",model="tide"}} 14.0' in lines
    assert f'tidepool_instance_cached_input_tokens_total{{instance="{instance}",model="tide"}} 5.0' in lines
    gateway.state.metrics.keep_instances(())
    assert instance not in gateway.state.metrics.render().decode()


@pytest.mark.parametrize("salt", ["", "x" * 513, 7])
def test_a_bad_salt_is_named(gateway: Gateway, salt: Any) -> None:
    answer = gateway.http.post("/v1/completions", json={"model": "tide", "prompt": "x", "cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
