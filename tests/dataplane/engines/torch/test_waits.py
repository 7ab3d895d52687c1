"""How often a decode step of the torch engine makes the host wait for the device, counted on a fake one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory.models import TorchModel
from dataplane.engines.torch.model.adapters import Factors
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.fake_device import FakeTensor, Waits, counted
from tests.dataplane.engines.torch.drive import request
from tests.dataplane.engines.torch.lora import adapter_maker, adapter_spec
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, spec_of

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 5, "frequency_penalty": 0.5},
    {"logit_bias": ((3, 2.0),), "min_tokens": 50},
)
BLOCK_TOKENS = 4
EXPERTS = {"mixtral", "qwen3_moe"}
"""Their grouped matrix product on a GPU is one that no CPU computes: they are not counted."""
Checkpoint = Callable[[str], Path]


def decode(folder: Path, sequences: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Waits, int]:
    """What a decode step of so many sequences waits for, some of which begin a block; how many tokens it made."""
    engine = engine_of(sequences)
    engine.load("a", spec_of("any", folder))
    for number in range(sequences):
        prompt = range(1, 9 + number % BLOCK_TOKENS)
        engine.add(
            request(str(number), prompt, max_tokens=60, **{"ignore_eos": True, **KINDS[number % len(KINDS)], **fields})
        )
    prefill(engine)
    return step(engine, monkeypatch)


def engine_of(sequences: int, *, mixed: bool = False) -> TorchEngine:
    settings = TorchEngineSettings(
        weights_bytes=2**21,
        kv_bytes=2**21,
        block_tokens=BLOCK_TOKENS,
        batch_max=sequences,
        prefix_cache=False,
        turns=TurnSettings(mixed_batches=mixed),
    )
    return TorchEngine(settings, lambda: 0.0)


def prefill(engine: TorchEngine) -> None:
    while any(not sequence.prefilled for sequence in engine.requests):
        engine.step()


def step(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[Waits, int]:
    """What the engine's last step waits for; how many tokens it made."""
    with counted() as waits:
        (model,) = engine.models.values()
        move(engine, model, monkeypatch)
        outputs = engine.step()
    engine.close()
    assert [output.error for output in outputs if output.error] == []
    return waits, sum(len(output.token_ids) for output in outputs)


def move(engine: TorchEngine, model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move a model and the KV cache to the fake device."""
    for module in model.weights.skeleton.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(FakeTensor(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else FakeTensor(buffer)
    held = model.weights.skeleton.adapters._adapters
    for name, adapter in held.items():
        layers = {at: Factors(down=FakeTensor(one.down), up=FakeTensor(one.up)) for at, one in adapter.layers.items()}
        held[name] = replace(adapter, layers=layers)
    engine._steps._batch_kv = None  # a device reads blocks where they are
    view = engine.kv.view
    monkeypatch.setattr(engine.kv, "view", lambda *given: FakeTensor(view(*given)))


@pytest.mark.parametrize(
    ("architecture", "sequences"),
    [("llama", 1), ("llama", 20), *((one, 5) for one in ARCHITECTURES if one not in EXPERTS)],
)
def test_a_decode_step_waits_for_its_tokens_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, architecture: str, sequences: int
) -> None:
    waits, tokens = decode(checkpoint(architecture), sequences, monkeypatch)
    assert tokens == sequences
    assert waits == ["tolist"]


@pytest.mark.parametrize("sequences", [1, 20])
def test_a_step_waits_for_log_probabilities_once_for_all(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    waits, tokens = decode(checkpoint("llama"), sequences, monkeypatch, logprobs=3)
    assert tokens == sequences
    assert waits == ["tolist"] * 3


def test_a_step_with_adapters_waits_for_its_tokens_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base, made, engine = checkpoint("llama"), adapter_maker(tmp_path, checkpoint), engine_of(5)
    engine.load("base", spec_of("model", base))
    for name in ("one", "two"):
        engine.load(name, adapter_spec(name, made("llama", name)[0], base))
    for number, name in enumerate(("base", "one", "two", "one", "base")):
        engine.add(request(str(number), range(1, 9 + number), instance_id=name, max_tokens=60, ignore_eos=True))
    prefill(engine)
    assert step(engine, monkeypatch) == (["tolist"], 5)


def between(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, *, steps: int, then: Callable[[], None] = lambda: None
) -> list[list[str]]:
    """What the host does between its wait for the tokens of a step and the next forward pass, for all but the last
    step. `then` is called after each.
    """
    with counted() as waits:
        (model,) = engine.models.values()
        move(engine, model, monkeypatch)
        for _ in range(steps):
            outputs = engine.step()
            assert [output.error for output in outputs if output.error] == []
            then()
    engine.close()
    assert waits == ["tolist"] * steps
    waited = [at for at, what in enumerate(waits.order) if what == "wait"]
    return [waits.order[at + 1 : waits.order.index("pass", at)] for at in waited[:-1]]


@pytest.mark.parametrize("sequences", [1, 5])
def test_nothing_is_uploaded_between_the_tokens_of_a_step_and_the_next_forward_pass(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """Blocks begin in some of these steps."""
    engine = engine_of(sequences)
    engine.load("a", spec_of("any", checkpoint("llama")))
    for number in range(sequences):
        engine.add(request(str(number), range(1, 9 + number), max_tokens=60, **{"ignore_eos": True, **KINDS[number]}))
    prefill(engine)
    assert between(engine, monkeypatch, steps=7) == [[]] * 6


def test_inputs_of_another_batch_than_expected_are_made_anew(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(2)
    engine.load("a", spec_of("any", checkpoint("llama")))
    for number in range(2):
        engine.add(request(str(number), range(1, 9 + number), max_tokens=60, ignore_eos=True))
    prefill(engine)
    assert between(engine, monkeypatch, steps=3, then=lambda: engine.cancel("0")) == [["upload"], []]


def test_a_step_of_prompts_and_sequences_waits_for_its_tokens_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(4, mixed=True)
    engine.load("a", spec_of("any", checkpoint("llama")))
    for number in range(3):
        engine.add(request(str(number), range(1, 9 + number), max_tokens=60, ignore_eos=True))
    prefill(engine)
    engine.add(request("late", range(1, 40), max_tokens=60, ignore_eos=True))
    assert step(engine, monkeypatch) == (["tolist"], 4)
