"""The gateway before a real agent: a worker process on the replay engine."""

import asyncio
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pydantic import SecretStr

from dataplane.protocol.errors import WorkerLostError
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import World, until
from tests.dataplane.replay_node import KEY, desired, instance, running_node


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


def ask_for_tokens(gateway: Gateway) -> None:
    tokens = gateway.http.post("/tokenize", json={"model": "tide", "prompt": "the tide", "return_token_strs": True})
    assert (tokens.json()["count"], tokens.json()["token_strs"]) == (2, ["the", "tide"])
    text = gateway.http.post("/detokenize", json={"model": "tide", "tokens": tokens.json()["tokens"]})
    assert text.json() == {"prompt": "the tide"}
    chat = gateway.http.post("/tokenize", json={"model": "tide", "messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["count"] == 3
    unknown = gateway.http.post("/detokenize", json={"model": "tide", "tokens": [99_999]})
    assert (unknown.status_code, assert_error(unknown)["param"]) == (400, "tokens")


def ask_for_several(gateway: Gateway) -> None:
    """The first choice is the only one of a request for one, and the same request makes the same choices."""

    def texts(**fields: Any) -> list[str]:
        made = gateway.client.completions.create(model="tide", prompt="the tide", max_tokens=12, seed=1, **fields)
        return [choice.text for choice in made.choices]

    several = texts(n=3)
    assert several == texts(n=3)
    assert several[:1] == texts()
    assert len(set(several)) == 3, "each has a seed of its own"
    assert set(texts(n=2, best_of=3)) < set(several)
    logprobs = gateway.client.completions.create(model="tide", prompt=["a", "b"], max_tokens=5, logprobs=2, n=2)
    assert [choice.index for choice in logprobs.choices] == [0, 1, 2, 3]
    for choice in logprobs.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.token_logprobs or ()) == 5
    assert logprobs.usage is not None
    assert (logprobs.usage.prompt_tokens, logprobs.usage.completion_tokens) == (2, 20)


def ask_again(gateway: Gateway) -> None:
    """A prompt is computed once, and the node says so."""
    prompt = "the tide turns at noon " * 20
    for cached in (0, 96):
        answer = gateway.client.completions.create(model="tide", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 100
        details = answer.usage.prompt_tokens_details
        assert (details and details.cached_tokens) == cached


def go_away(gateway: Gateway) -> None:
    body = {"model": "tide", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "n": 3}
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
            with running_gateway(world, node_key=SecretStr(KEY)) as gateway:
                for check in (ask, ask_too_much, ask_for_tokens, ask_for_several, ask_again, go_away):
                    await asyncio.to_thread(check, gateway)
                await node.until(node.idle)
                [report] = node.agent.reports()
                assert report.prefill_wait_s == report.prefill_urgent_wait_s == 0.0
                assert report.prefill_token_s is not None
                assert report.prefill_token_s > 0.0

    asyncio.run(run())


def test_models_tell_the_context_that_the_node_takes(world: World) -> None:
    def ask_at_the_limit(gateway: Gateway) -> None:
        def told() -> int:
            return int(gateway.http.get("/v1/models/tide").json()["max_model_len"])

        until(lambda: told() < 4096)
        limit = told()
        assert gateway.http.get("/v1/models").json()["data"][0]["max_model_len"] == limit
        body = {"model": "tide", "prompt": [1] * (limit - 2), "ignore_eos": True}
        fits = gateway.http.post("/v1/completions", json=body | {"max_tokens": 2})
        assert fits.json()["usage"]["total_tokens"] == limit
        refused = gateway.http.post("/v1/completions", json=body | {"max_tokens": 3})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert f"at most {limit} here" in refused.json()["error"]["message"]

    async def run() -> None:
        async with running_node() as node:
            url = str(node.client.base_url).rstrip("/")
            world.join("n0", url=url)
            held = world.place("n0")
            await node.hold(1, instance(held, kv_bytes_per_token=8192))
            world.live.write_heartbeat(node.agent.heartbeat(), region="us-east", gpu_type="H800", url=url)
            with running_gateway(world, node_key=SecretStr(KEY)) as gateway:
                assert gateway.http.get("/v1/models/tide").json()["context_tokens"] == 4096
                await asyncio.to_thread(ask_at_the_limit, gateway)

    asyncio.run(run())


class Streaming:
    """A request to the gateway for two answers, with penalties and log probabilities, that streams in a thread of its
    own.
    """

    def __init__(self, gateway: Gateway, max_tokens: int) -> None:
        self.pieces = [0, 0]
        self._gateway, self._max_tokens = gateway, max_tokens

    def run(self) -> tuple[list[str], list[list[tuple[str, float]]], int]:
        """The texts, their tokens with their log probabilities, and the number of tokens."""
        chunks = self._gateway.client.completions.create(
            model="tide", prompt="the tide", max_tokens=self._max_tokens, temperature=0.8, seed=7, stream=True,
            n=2, logprobs=1, frequency_penalty=0.2,
            stop=["no such words"], stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts, logprobs, tokens = ["", ""], [[], []], 0  # type: ignore[var-annotated]
        for chunk in chunks:
            for choice in chunk.choices:
                self.pieces[choice.index] += 1
                texts[choice.index] += choice.text
                found = choice.logprobs
                if found is not None:
                    logprobs[choice.index] += zip(found.tokens or (), found.token_logprobs or (), strict=True)
            tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
        return texts, logprobs, tokens


def test_a_stream_outlives_its_nodes(world: World) -> None:
    """Two real nodes: an instance is taken away in mid-stream, a node is drained, a node goes down."""

    async def run() -> None:
        async with running_node() as first, running_node() as second:
            nodes = {"n0": first, "n1": second}
            held = {}
            for name, node in nodes.items():
                url = str(node.client.base_url).rstrip("/")
                world.join(name, url=url)
                held[name] = world.place(name)
                await node.hold(1, instance(held[name]))
                world.report(name, held[name], region="us-east", url=url)
            with running_gateway(world, node_key=SecretStr(KEY)) as gateway:
                undisturbed = await asyncio.to_thread(Streaming(gateway, 300).run)
                assert undisturbed[2] == 2 * 300
                assert [len(tokens) for tokens in undisturbed[1]] == [300, 300]
                assert undisturbed[0][0] != undisturbed[0][1]
                for generation, loss in enumerate(("taken away", "drained", "down"), start=2):
                    stream = Streaming(gateway, 300)
                    running = asyncio.create_task(asyncio.to_thread(stream.run))
                    await first.until(lambda stream=stream: min(stream.pieces) > 10)
                    busy = next(node for node in nodes.values() if node.in_flight())
                    mine = next(held[name] for name, node in nodes.items() if node is busy)
                    if loss == "taken away":
                        busy.agent.apply(desired(10 * generation))
                    elif loss == "drained":
                        busy.agent.apply(desired(10 * generation, instance(mine, draining=True)))
                    else:
                        for group in busy.agent.groups:
                            group.dispatcher.end_all(WorkerLostError("the agent is shutting down"))
                    assert await running == undisturbed, loss
                    await busy.until(busy.idle)
                    await busy.hold(10 * generation + 1, instance(mine))
                metrics = (await asyncio.to_thread(gateway.http.get, "/metrics")).text
                assert 'tidepool_continuations_total{model="tide",tier="IW-N"} 4.0' in metrics

    asyncio.run(run())
