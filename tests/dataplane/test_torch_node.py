"""A node whose worker runs the torch engine on a tiny checkpoint: text comes out, and survives a killed worker."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from dataplane.messages import DesiredInstance, Finished, ModelSpec, Sampling, StreamEvent, Token, decode_line
from dataplane.settings import SlotSettings
from tests.dataplane.engines.torch.tiny import save_tiny
from tests.dataplane.replay_node import Node, generate, running_node, settings
from tests.dataplane.test_text import write_tokenizer

CONTEXT_TOKENS = 256


def checkpoint(folder: Path) -> ModelSpec:
    save_tiny("llama", folder, vocab_size=258, eos_token_id=257, bos_token_id=256)
    write_tokenizer(folder, None)
    weights_bytes = (folder / "model.safetensors").stat().st_size
    kv_bytes_per_token = 2 * 3 * 2 * 12 * 4  # keys and values, 3 layers, 2 heads of 12, float32
    return ModelSpec(
        name="tide",
        path=str(folder),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        context_tokens=CONTEXT_TOKENS,
    )


async def answer(node: Node, request_id: str, sampling: Sampling, kill_after: int | None = None) -> list[StreamEvent]:
    body, events = msgspec.json.encode(generate(request_id, sampling=sampling)), []
    async with node.client.stream("POST", "/generate", content=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events.append(decode_line(line))
            pid = node.agent.slots[0].pid
            if len(events) == kill_after and pid is not None:
                os.kill(pid, signal.SIGKILL)
    return events


def token_ids(events: list[StreamEvent]) -> list[int]:
    return [token_id for event in events if isinstance(event, Token) for token_id in event.token_ids]


@pytest.mark.slow
def test_a_killed_torch_worker_changes_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        ours = settings(engine="torch", profile=None, slots=(SlotSettings(gpus=1, memory_bytes=8 * 2**20),))
        async with running_node(ours) as node:
            await node.hold(1, DesiredInstance(instance_id="i1", slot=0, gpus=1, model=checkpoint(tmp_path)))
            sampling = Sampling(max_tokens=200, temperature=1.0, seed=5, ignore_eos=True)
            calm = await answer(node, "calm", sampling)
            assert calm[-1] == Finished(finish_reason="length", prompt_tokens=14, completion_tokens=200)
            storm = await answer(node, "storm", sampling, kill_after=5)
            assert node.agent.slots[0].restarts_total == 1
            assert token_ids(storm) == token_ids(calm)
            assert storm[-1] == calm[-1]

    asyncio.run(scenario())
