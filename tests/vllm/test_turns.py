"""Several models in one process: they take turns, leave and come back, and no request is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.vllm import interfaces
from dataplane.protocol.errors import ModelLoadError
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.test_greedy import prompts
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

MODELS = ("llama", "qwen3", "mixtral")
"""One with experts comes after those without."""
QUICK = TurnSettings(decode=DecodeSettings(quota_max_s=0.01, quota_min_s=0.01))
"""Turns so short that they change after every few steps on any machine."""
Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("awake_max", [1, 2])
def test_three_models_in_turns(
    awake_max: int, checkpoint: Checkpoint, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engine = make_engine(models_max=3, awake_max=awake_max, turns=QUICK, cache_folder=tmp_path / "cache")
    given = prompts(VOCABULARY, (6, 18, 33))
    for model in MODELS:
        engine.load(model, spec_of(model, checkpoint(model)))
        for name, prompt in given.items():
            engine.add(request(model + name, prompt, instance_id=model, max_tokens=12))
    outputs, seen = [], set()
    while engine.has_work():
        outputs += engine.step()
        seen.add(frozenset(engine.stats().resident_models))
    assert {len(awake) for awake in seen} == {awake_max}
    assert set().union(*seen) == set(MODELS)
    assert engine.stats().switches_total > len(MODELS)
    assert not [output.error for output in outputs if output.error]
    for model in MODELS:
        for name, prompt in given.items():
            made = tuple(t for output in outputs if output.request_id == model + name for t in output.token_ids)
            assert made == greedy_tokens(checkpoint(model), prompt, 12)


def test_what_sleeps_holds_no_memory_of_the_slot(
    checkpoint: Checkpoint, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(models_max=3)
    for model in MODELS[:2]:
        engine.load(model, spec_of(model, checkpoint(model)))
    asleep, awake = (engine.models[model].runner for model in MODELS[:2])
    sizes = {}
    for runner in (asleep, awake):
        worker = runner.engine.engine_core.engine_core.model_executor.driver_worker.worker
        tensors = [*worker.get_model().parameters(), *worker.model_runner.kv_caches]
        sizes[runner] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert sizes[asleep] == 0
    assert sizes[awake] > 2**21
    assert engine.stats().resident_models == (MODELS[1],)
    awake.scratch = object()
    awake.step()
    assert interfaces.scratch() is awake.scratch, "of the process there is one: each has its own put there"
    monkeypatch.setattr(interfaces, "keeps_kv_addresses", lambda _: True)
    with pytest.raises(ModelLoadError, match="its KV cannot move"):
        engine.load("unmoved", spec_of(MODELS[2], checkpoint(MODELS[2])))
    assert [stats.instance_id for stats in engine.stats().instances] == list(MODELS[:2])


def test_requests_of_a_sleeping_model_are_cancelled_and_unloaded_too(
    checkpoint: Checkpoint, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engine = make_engine(models_max=2, cache_folder=tmp_path)
    engine.load("a", spec_of("llama", checkpoint("llama")))
    for name in ("gone", "ended", "stays"):
        engine.add(request(name, [5, 6, 7], max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.stats().extra["load_s"] == 0, "nobody waited for the first"
    engine.load("b", spec_of("qwen3", checkpoint("qwen3")))
    assert engine.stats().extra["load_s"] > 0
    assert engine.stats().resident_models == ("qwen3",)
    engine.cancel("gone")
    model = engine.models["llama"]
    before, weights_s = model.estimate, model.wake_s
    assert model.switch_s > weights_s, "its tokens are prefilled again"
    assert {o.request_id for o in engine.step()} == {"ended", "stays"}
    assert model.estimate.decode_factor == before.decode_factor, "that was a prefill"
    assert model.estimate.prefill_factor != before.prefill_factor
    engine.step()
    assert model.estimate.decode_factor != before.decode_factor
    engine.load("c", spec_of("llama", checkpoint("llama")))
    engine.unload("b")
    gathered = drain(engine)
    assert set(gathered.finished) == {"ended", "stays"}
    engine.unload("a")
    engine.unload("c")
    assert engine.stats().instances == ()
    engine.load("a", spec_of("llama", checkpoint("llama")))
    assert len(list(tmp_path.glob("*.model"))) == 2, "it found its weights where it left them"
    engine.add(request("again", [5, 6, 7]))
    assert drain(engine).tokens["again"] == greedy_tokens(checkpoint("llama"), [5, 6, 7], 8)


def test_a_slot_of_one_model_takes_no_second(checkpoint: Checkpoint, make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    engine.load("a", spec_of("llama", checkpoint("llama")))
    engine.load("b", spec_of("llama", checkpoint("llama")))
    with pytest.raises(ModelLoadError, match="models_max=1, and this slot has llama"):
        engine.load("c", spec_of("qwen3", checkpoint("qwen3")))
    engine.add(request("r", [5, 6, 7], instance_id="b"))
    assert drain(engine).tokens["r"] == greedy_tokens(checkpoint("llama"), [5, 6, 7], 8)
