"""The gateway before a real agent: a worker process on the replay engine."""

import asyncio

import httpx2 as httpx
import openai
import pytest

from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import World
from tests.dataplane.replay_node import KEY, instance, running_node


def ask(gateway: Gateway) -> None:
    answer = gateway.client.completions.create(model="tide", prompt="the tide", max_tokens=5, seed=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    chunks = gateway.client.completions.create(
        model="tide", prompt="the tide", max_tokens=5, seed=1, stream=True, stream_options={"include_usage": True}
    )
    texts, usages = [], []
    for chunk in chunks:
        texts += [choice.text for choice in chunk.choices]
        usages.append(chunk.usage)
    assert ("".join(texts), usages[-1]) == (answer.choices[0].text, answer.usage)
    whole = gateway.client.chat.completions.create(
        model="tide", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3


def ask_too_much(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.completions.create(model="tide", prompt="the tide " * 900, max_tokens=4000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def go_away(gateway: Gateway) -> None:
    body = {"model": "tide", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    with gateway.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    with pytest.raises(httpx.TimeoutException):
        gateway.http.post("/v1/completions", json=body, timeout=0.3)


def test_a_real_node(world: World) -> None:
    async def run() -> None:
        async with running_node() as node:
            url = str(node.client.base_url).rstrip("/")
            world.join("n0", url=url)
            held = world.place("n0")
            await node.hold(1, instance(held))
            world.report("n0", held, region="us-east", url=url)
            with running_gateway(world, node_key=KEY) as gateway:
                for check in (ask, ask_too_much, go_away):
                    await asyncio.to_thread(check, gateway)
                await node.until(node.idle, timeout_s=10)

    asyncio.run(run())
