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
