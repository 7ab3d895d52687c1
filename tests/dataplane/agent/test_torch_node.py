"""Nodes whose workers run the torch engine on tiny checkpoints: text comes out, and survives killed workers."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.agent.answers import engine_request
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.agent.tokenization import load_tokenizer
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import (
    BaseModel,
    DesiredInstance,
    Finished,
    Generate,
    ModelSpec,
    Sampling,
    StreamEvent,
    Token,
    TokenLogprob,
)
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.agent.test_tokenization import write_tokenizer
from tests.dataplane.engines.torch.tiny import save_tiny
from tests.dataplane.replay_node import desired, generate, running_node, settings
from tests.dataplane.streams import read, read_together, token_ids
from tests.event_loop import asynchronous

CONTEXT_TOKENS = 256


def checkpoint(folder: Path, name: str = "tide", **changes: Any) -> ModelSpec:
    save_tiny("llama", folder, vocab_size=258, eos_token_id=257, bos_token_id=256, **changes)
    write_tokenizer(folder, None)
    weights_bytes = (folder / "model.safetensors").stat().st_size
    kv_bytes_per_token = 2 * 3 * 2 * 12 * 4  # keys and values, 3 layers, 2 heads of 12, float32
    return ModelSpec(
        name=name,
        path=str(folder),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        context_tokens=CONTEXT_TOKENS,
    )


def torch_settings(count: int, **changes: Any) -> AgentSettings:
    given = tuple(WorkerSettings(gpus=1, memory_bytes=8 * 2**20) for _ in range(count))
    patient = {"worker_losses_max": 100, "worker_wait_max_s": 3600.0}  # a start takes long where others work too
    return settings(engine="torch", profile=None, slots=given, cache_bytes=2**26, **patient | changes)


def body(request_id: str, seed: int, name: str = "tide") -> Generate:
    """Odd seeds ask for penalties, bias and log probabilities."""
    sampling = Sampling(max_tokens=60 + seed % 40, temperature=1.0, seed=seed, ignore_eos=True)
    if seed % 2:
        sampling = msgspec.structs.replace(
            sampling,
            frequency_penalty=0.6,
            presence_penalty=0.4,
            repetition_penalty=1.2,
            logit_bias=((101, 3.0), (32, -100.0)),
            top_k=60,
            min_p=0.01,
            logprobs=3,
        )
    return generate(f"{request_id}-{seed}-{name}", instance_id=f"i-{name}", model=name, sampling=sampling)


def logprobs_of(events: list[StreamEvent]) -> list[TokenLogprob]:
    return [one for event in events if isinstance(event, Token) for one in event.logprobs]


def check_same(events: list[StreamEvent], calm: list[StreamEvent]) -> None:
    """That two streams have the same tokens, and log probabilities that differ by rounding alone."""
    assert token_ids(events) == token_ids(calm)
    ours, theirs = logprobs_of(events), logprobs_of(calm)
    assert [one.token.token_id for one in ours] == [one.token.token_id for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        values, expected = ([top.logprob for top in (both.token, *both.top)] for both in (one, other))
        assert values == pytest.approx(expected, abs=1e-3)


def instances(specs: list[ModelSpec]) -> list[DesiredInstance]:
    return [DesiredInstance(instance_id=f"i-{spec.name}", slot=0, gpus=1, model=spec) for spec in specs]


@pytest.mark.slow
@asynchronous
async def test_a_killed_torch_worker_changes_no_token(tmp_path: Path) -> None:
    async with running_node(torch_settings(1)) as node:
        await node.hold(1, *instances([checkpoint(tmp_path)]))
        calm = await read(node, body("calm", 139))
        assert calm[-1] == Finished(finish_reason="length", prompt_tokens=14, completion_tokens=79)
        storm = await read(node, body("storm", 139), kill_at=5)
        check_same(storm, calm)
        asked = logprobs_of(calm)
        assert [one.token.token_id for one in asked] == token_ids(calm)
        assert all(len(one.top) == 3 and one.token.token_id != 32 for one in asked)
        assert b"".join(bytes(one.token.utf8) for one in asked).decode(errors="replace") == "".join(
            event.text for event in calm if isinstance(event, Token)
        )
        assert node.agent.workers[0].restarts_total == 1


@pytest.mark.slow
@asynchronous
async def test_a_repeated_prompt_is_cached_and_a_killed_worker_changes_neither_tokens_nor_that_count(
    tmp_path: Path,
) -> None:
    async with running_node(torch_settings(1)) as node:
        await node.hold(1, *instances([checkpoint(tmp_path)]))
        prompt, sampling = "the tide turns, and turns again. " * 2, Sampling(max_tokens=40, seed=3, ignore_eos=True)
        asked = [
            generate(f"r{number}", instance_id="i-tide", prompt=prompt, sampling=sampling, cache_salt=salt)
            for number, salt in enumerate(("tenant", "tenant", "other", "tenant"))
        ]
        events = [await read(node, one) for one in asked[:3]]
        events.append(await read(node, asked[3], kill_at=5))
        ends = [one[-1] for one in events]
        assert [end.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 64, 0, 64]
        assert len({tuple(token_ids(one)) for one in events}) == 1
        assert node.agent.workers[0].restarts_total == 1


def calm_tokens(specs: list[ModelSpec], seeds: list[tuple[str, int]]) -> list[list[int]]:
    """What one engine that nobody disturbs makes of the same requests."""
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**22, kv_bytes=2**22), time.monotonic)
    made: dict[str, list[int]] = {}
    for spec in specs:
        engine.load(f"i-{spec.name}", spec)
    for name, seed in seeds:
        wanted = body("calm", seed, name)
        text = load_tokenizer(next(spec.path for spec in specs if spec.name == name), "torch")
        prompt = text.encode_text(wanted.prompt or "", tokens_max=2**12)
        engine.add(engine_request(wanted, prompt, specs[0], tokens_max=2**12))
        made[wanted.request_id] = []
    while engine.has_work():
        for output in engine.step():
            made[output.request_id] += output.token_ids
    return list(made.values())


@pytest.mark.slow
@asynchronous
async def test_split_torch_slots_change_no_token_whatever_dies(tmp_path: Path) -> None:
    chance = random.Random(2)
    layers = {"tide": 3, "ebb": 2}
    specs = [checkpoint(tmp_path / name, name, num_hidden_layers=count) for name, count in layers.items()]
    seeds = [(name, seed) for name in layers for seed in range(4)]
    calm = calm_tokens(specs, seeds)
    async with running_node(torch_settings(2, split=True)) as node:
        await node.hold(1, *instances(specs))
        for kind in (None, "prefill", "decode"):
            asked = [body(f"split-{kind}", seed, name) for name, seed in seeds]
            kill_at = None if kind is None else (chance.randrange(len(seeds)), chance.randrange(1, 30))
            answers = await read_together(node, asked, kill_at=kill_at, kind=kind or "both")
            assert [token_ids(events) for events in answers] == calm
            await node.until(lambda: set(node.states().values()) == {"ready"})
            left = (read(node, body(f"left-{kind}", seed, name), events_max=seed + 2) for name, seed in seeds)
            await asyncio.gather(*left)
            await node.until(node.idle)


@pytest.mark.slow
@asynchronous
async def test_adapters_and_their_base_answer_at_once_and_after_a_lost_worker(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "tide")
    specs = [base, *(adapter_of(base, tmp_path / name) for name in ("one", "two"))]
    alone = []
    async with running_node(torch_settings(1)) as node:
        await node.hold(1, *instances(specs))
        alone += [token_ids(await read(node, body("alone", 2, spec.name))) for spec in specs]
        assert len({tuple(tokens) for tokens in alone}) == len(specs)
        for kill_at in (None, 5):
            asked = [body(f"together-{kill_at}", 2, spec.name) for spec in specs]
            together = await read_together(node, asked, kill_at=None if kill_at is None else (0, kill_at))
            assert [token_ids(events) for events in together] == alone
        await node.until(lambda: node.agent.workers[0].restarts_total == 1)


@asynchronous
async def test_an_adapter_that_is_not_supported_fails_with_the_reason(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "tide")
    broken = adapter_of(base, tmp_path / "one", use_dora=True)
    async with running_node(torch_settings(1)) as node:
        node.agent.apply(desired(1, *instances([broken])))
        await node.until(lambda: node.states() == {"i-one": "failed"})
        [report] = node.agent.reports()
        assert report.error is not None
        assert "use_dora is not supported" in report.error


def adapter_of(base: ModelSpec, folder: Path, **config: Any) -> ModelSpec:
    build_tiny_adapter(folder, Path(base.path), **config)
    of = BaseModel(name=base.name, path=base.path, weights_bytes=base.weights_bytes)
    changes = {"name": folder.name, "path": str(folder), "weights_bytes": 1, "base": of}
    return msgspec.structs.replace(base, **changes)
