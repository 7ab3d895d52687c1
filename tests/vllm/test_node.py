"""A node that moves a model from one engine to another while requests of it are in flight: none is lost or changed."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from dataplane.protocol.messages import DesiredInstance, EngineChoice, Failed, Finished, Generate, Sampling
from tests.dataplane.agent.test_torch_node import adapter_of, body, checkpoint, torch_settings
from tests.dataplane.replay_node import Node, desired, generate, running_node
from tests.dataplane.streams import read, token_ids
from tests.vllm.conftest import HEAD_DIM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

PROMPT_TOKENS = 14
MAX_TOKENS = 230
TEMPERATURES = (0.0, 0.8)
LONG = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
ENGINES: tuple[EngineChoice, ...] = ("torch", "vllm")


def asked(name: str, temperature: float) -> Generate:
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    return generate(f"{name}-{temperature}", sampling=sampling)


async def tokens(node: Node, name: str) -> list[list[int]]:
    """The whole answers of a greedy request and one that samples, sent together."""
    streams = await asyncio.gather(*(read(node, asked(name, temperature)) for temperature in TEMPERATURES))
    end = Finished(finish_reason="length", prompt_tokens=PROMPT_TOKENS, completion_tokens=MAX_TOKENS)
    assert [events[-1] for events in streams] == [end] * len(TEMPERATURES)
    return [token_ids(events) for events in streams]


def test_a_base_and_its_adapters_share_a_slot_on_vllm(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "tide", head_dim=HEAD_DIM)
    specs = [base, *(adapter_of(base, tmp_path / name) for name in ("one", "two"))]

    def on(engine: EngineChoice) -> list[DesiredInstance]:
        models = [msgspec.structs.replace(spec, engine=engine) for spec in specs]
        return [DesiredInstance(instance_id=f"i-{one.name}", slot=0, gpus=0, model=one) for one in models]

    async def scenario() -> None:
        async with running_node(torch_settings(1, vllm_adapters_max=2, vllm_adapter_rank_max=4)) as node:
            answers = []
            for generation, engine in enumerate(ENGINES, start=1):
                await node.hold(generation, *on(engine))
                assert node.agent.workers[0].engine == engine
                asked = [body(f"on-{engine}", 2, spec.name) for spec in specs]
                streams = await asyncio.gather(*(read(node, one) for one in asked))
                answers.append([token_ids(events) for events in streams])
            assert answers[0] == answers[1]
            assert len({tuple(tokens) for tokens in answers[1]}) == len(specs)

    asyncio.run(scenario())


def test_a_dedicated_instance_serves_its_base_and_adapters(tmp_path: Path) -> None:
    """The node reserves no memory for adapters, so the instance does for those that it is loaded with: another one that
    fits in comes in the midst of a stream, and one of a higher rank says what it needs.
    """
    base = msgspec.structs.replace(checkpoint(tmp_path / "tide", head_dim=HEAD_DIM), engine="vllm")
    names = ("one", "two", "three")
    adapters = {name: adapter_of(base, tmp_path / name) for name in names} | {
        "high": adapter_of(base, tmp_path / "high", rank=16)
    }
    host = DesiredInstance(instance_id="i-tide", slot=0, gpus=1, model=base)

    def on(*served: str) -> list[DesiredInstance]:
        beside = (
            DesiredInstance(instance_id=f"i-{name}", slot=0, gpus=1, model=adapters[name], host="i-tide")
            for name in served
        )
        return [host, *beside]

    async def answers(node: Node, request_id: str, *served: str) -> list[list[int]]:
        streams = await asyncio.gather(*(read(node, body(request_id, 2, name)) for name in ("tide", *served)))
        return [token_ids(events) for events in streams]

    async def scenario() -> None:
        async with running_node(torch_settings(1)) as node:
            (worker,) = node.agent.workers
            await node.hold(1, *on("one", "two"))
            assert worker.engine == "vllm"
            before, ran = await answers(node, "before", "one", "two"), (worker.pid, worker.restarts_total)
            assert len({tuple(tokens) for tokens in before}) == 3

            asked = generate("long", instance_id="i-one", model="one", sampling=LONG)
            stream = asyncio.create_task(read(node, asked))
            await node.until(lambda: node.in_flight() == 1)
            node.agent.apply(desired(2, *on("two", "three", "high")))
            await node.until(lambda: node.states().get("i-high") == "failed")
            (error,) = [one.error for one in node.agent.reports() if one.instance_id == "i-high"]
            assert error is not None
            assert "r is 16, and its base is loaded for ranks up to 8 (vllm_adapter_rank_max) until it is" in error
            assert len(token_ids(await stream)) == MAX_TOKENS
            await node.until(lambda: "i-one" not in node.states() and node.states()["i-three"] == "ready")
            assert (await answers(node, "after", "two"))[:2] == [before[0], before[2]]
            assert (worker.pid, worker.restarts_total) == ran

    asyncio.run(scenario())


def test_a_model_moves_between_engines_in_the_midst_of_its_requests(tmp_path: Path) -> None:
    spec = checkpoint(tmp_path, head_dim=HEAD_DIM)

    def on(engine: EngineChoice) -> DesiredInstance:
        model = msgspec.structs.replace(spec, engine=engine)
        return DesiredInstance(instance_id="i1", slot=0, gpus=1, model=model)

    async def scenario() -> None:
        async with running_node(torch_settings(1, worker_losses_max=0)) as node:
            (worker,), (group,) = node.agent.workers, node.agent.groups
            await node.hold(1, on("torch"))
            calm = await tokens(node, "calm")
            moves: tuple[EngineChoice, ...] = ("vllm", "torch")
            for generation, engine in enumerate(moves, start=2):
                tokens_before = worker.stats.tokens_total
                moving = asyncio.create_task(tokens(node, f"to-{engine}"))
                await node.until(lambda: worker.stats.tokens_total > tokens_before)  # noqa: B023  (ends within the round)
                node.agent.apply(desired(generation, on(engine)))
                await node.until(lambda: group.dispatcher.count(None) == len(TEMPERATURES))
                (refused,) = await read(node, asked("meanwhile", 0.0))
                assert isinstance(refused, Failed)
                assert refused.retryable, "another instance may take it"
                assert await moving == calm
                assert worker.engine == engine
                assert await tokens(node, f"on-{engine}") == calm
            await node.until(node.idle)

    asyncio.run(scenario())
