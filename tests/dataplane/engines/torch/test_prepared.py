"""Steps that are prepared while the step before runs: what they change, which is nothing, and when they are dropped."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory.kv import SequenceKv
from dataplane.engines.torch.model.prepared import PreparedStep
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.steps import Steps
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.drive import Gathered, request, stepped
from tests.dataplane.engines.torch.slots import SLAB_BYTES, slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, spec_of

Checkpoint = Callable[[str], Path]
BLOCK_TOKENS = 4
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((5, 3.0), (2, -100.0)), "logprobs": 2},
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[bool]]:
    """Of the steps that were prepared, how many ran (True), and how many were dropped for another batch (False)."""
    counted: Counter[bool] = Counter()
    real = PreparedStep.run

    def run(step: PreparedStep, chunks: Any) -> torch.Tensor | None:
        logits = real(step, chunks)
        counted[logits is not None] += 1
        return logits

    monkeypatch.setattr(PreparedStep, "run", run)
    return counted


def requests_of(models: list[str], count: int) -> list[EngineRequest]:
    """Requests of all kinds, some of which have a prefix in common, and some of which are cancelled."""
    chance = random.Random(count)
    shared = [chance.randrange(3, VOCABULARY) for _ in range(2 * BLOCK_TOKENS)]
    made = []
    for number in range(count):
        own = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(1, 12))]
        made.append(
            request(
                f"leaves-{number}" if number % 7 == 3 else f"stays-{number}",
                shared * (number % 3 == 0) + own,
                instance_id=models[number % len(models)],
                max_tokens=chance.randrange(1, 30),
                **KINDS[number % len(KINDS)],
            )
        )
    return made


def answers(engine: TorchEngine, wanted: list[EngineRequest], chance: random.Random) -> Gathered:
    """The answers to requests that arrive at random; those that leave do so after two tokens. Memory is checked."""
    pending, gathered = wanted[::-1], Gathered()
    while pending or engine.has_work():
        if pending and chance.random() < 0.5:
            engine.add(pending.pop())
        outputs = stepped(engine)
        engine.check()
        gathered.take(outputs)
        for output in outputs:
            if output.request_id.startswith("leaves-") and len(gathered.tokens[output.request_id]) >= 2:
                engine.cancel(output.request_id)
    assert gathered.errors == {}
    return gathered


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("slabs", [3, 40])
def test_tokens_are_those_of_steps_that_are_not_prepared(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, runs: Counter[bool], slabs: int, mixed: bool
) -> None:
    """Two models take turns, on memory in which their requests are swapped, and on enough."""
    names = ["llama", "qwen3"]
    turns = TurnSettings(decode=DecodeSettings(quota_min_s=0.01, quota_max_s=0.02), mixed_batches=mixed)

    def engine_of() -> TorchEngine:
        folders = [checkpoint(name) for name in names]
        memory = {"kv_bytes": slabs * SLAB_BYTES, "host_kv_bytes": 2**21}
        settings = slot_for_one(folders, block_tokens=BLOCK_TOKENS, turns=turns, **memory)
        engine = TorchEngine(settings, Ticks())
        for name in names:
            engine.load(name, spec_of(name, checkpoint(name)))
        return engine

    prepared = engine_of()
    made = answers(prepared, requests_of(names, 24), random.Random(1))
    assert (prepared.stats().extra["swapped_out"] > 0) == (slabs == 3)
    assert set(runs) == {True, False}
    monkeypatch.setattr(Steps, "_prepare", lambda *_: None)
    plain = engine_of()
    expected = answers(plain, requests_of(names, 24), random.Random(1))
    stay = {name for name in expected.tokens if name.startswith("stays-")}
    assert {name: made.tokens[name] for name in stay} == {name: expected.tokens[name] for name in stay}
    assert made.scores.keys() == expected.scores.keys()
    prepared.close()
    plain.close()


def decoding(checkpoint: Checkpoint, sequences: int, prompt_tokens: int, **settings: Any) -> TorchEngine:
    """A slot that decodes sequences of llama, after their first step."""
    given = {"weights_bytes": 2**21, "kv_bytes": 2**21, "block_tokens": BLOCK_TOKENS, **settings}
    engine = TorchEngine(TorchEngineSettings(**given), Ticks())
    engine.load("a", spec_of("any", checkpoint("llama")))
    for number in range(sequences):
        prompt = [(number + at) % VOCABULARY for at in range(prompt_tokens)]
        engine.add(request(str(number), prompt, max_tokens=30, ignore_eos=True))
    while not all(sequence.prefilled for sequence in engine.requests):
        engine.step()
    engine.step()
    return engine


def test_blocks_of_a_step_that_never_comes_are_free_with_their_sequence(checkpoint: Checkpoint) -> None:
    engine = decoding(checkpoint, sequences=3, prompt_tokens=2 * BLOCK_TOKENS - 1, prefix_cache=False)
    assert engine._steps._prepared is not None
    assert [len(sequence.kv.blocks) for sequence in engine.requests] == [3] * 3, "the next token begins a block"
    engine.check()
    for number in range(3):
        engine.cancel(str(number))
    engine.step()
    engine.check()
    assert engine.kv.device_cache.held_blocks() == {}
    engine.close()


def test_nothing_is_prepared_at_the_cost_of_cached_prefixes(checkpoint: Checkpoint) -> None:
    """They fill the memory: the block of the next step replaces one of them when it is needed, not before."""
    engine = decoding(checkpoint, sequences=1, prompt_tokens=2 * BLOCK_TOKENS - 2, kv_bytes=2**16, slab_bytes=2**14)
    (sequence,) = engine.requests
    kv = sequence.kv
    while engine.kv.device_cache.free_blocks(kv.shape) or engine.arena.free_kv_slabs:
        other = SequenceKv(shape=kv.shape, model="other")
        engine.kv.track(other, list(range(VOCABULARY)), salt=str(engine.kv.device_cache.idle_blocks(kv.shape)))
        assert engine.kv.grow(other, BLOCK_TOKENS)
        engine.kv.computed(other, BLOCK_TOKENS)
        engine.kv.drop(other)
    engine.check()
    idle, blocks = engine.kv.device_cache.idle_blocks(kv.shape), len(kv.blocks)
    assert engine._steps._prepared is not None, "its token is the last one of a block"
    engine.step()
    assert engine._steps._prepared is None
    assert (engine.kv.device_cache.idle_blocks(kv.shape), len(kv.blocks)) == (idle, blocks)
    engine.step()
    assert (engine.kv.device_cache.idle_blocks(kv.shape), len(kv.blocks)) == (idle - 1, blocks + 1)
    engine.check()
    engine.close()


@pytest.mark.parametrize(("tokens", "is_prepared"), [(2, False), (3, True)])
def test_nothing_is_prepared_after_a_last_token(checkpoint: Checkpoint, tokens: int, is_prepared: bool) -> None:
    """The step that is looked at makes the second token."""
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**21, kv_bytes=2**21), Ticks())
    engine.load("a", spec_of("any", checkpoint("llama")))
    engine.add(request("0", (3, 4, 5), max_tokens=tokens, ignore_eos=True))
    engine.step()
    assert engine._steps._prepared is None, "a prefill"
    engine.step()
    assert (engine._steps._prepared is not None) == is_prepared
    engine.close()


def test_a_model_that_is_forgotten_leaves_nothing_prepared(checkpoint: Checkpoint) -> None:
    engine = decoding(checkpoint, sequences=1, prompt_tokens=3)
    assert engine._steps._prepared is not None
    engine.unload("a")
    assert engine._steps._prepared is None
    engine.close()
