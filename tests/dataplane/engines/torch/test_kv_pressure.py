"""KV pressure: which action is taken, whose layers are offloaded, and what it costs."""

import pytest

from dataplane.engines.core.pressure import KvPressure, Shortage
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory import transfer_rates
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.decode import idle_s
from tests.dataplane.engines.torch.deep import (
    Deep,
    Undisturbed,
    decoding_here,
    drain_outputs,
    loaded,
    pool_of,
    pressure_of,
    run_dry,
    slot,
    steps_until,
    wants,
)
from tests.dataplane.engines.torch.drive import Gathered, request


def test_more_requests_run_together_than_without(deep: Deep) -> None:
    running = {}
    for action in ("remap", "swap"):
        engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure=action))
        for wanted in wants(["llama"], 8):
            engine.add(wanted)
        most = 0
        while engine.has_work():
            engine.step()
            most = max(most, len(decoding_here(engine, "llama")))
        running[action] = most
        engine.close()
    assert running["remap"] > running["swap"]


@pytest.mark.parametrize("action", ["swap", "recompute", "refuse"])
def test_each_action_can_be_forced(deep: Deep, undisturbed: Undisturbed, action: KvPressure) -> None:
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure=action))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) == 0
    assert gathered.tokens == undisturbed(requests)
    assert pool_of(engine).pressure_actions[action] > 0
    assert engine.stats().extra["recomputed"] > 0 or action != "recompute", (
        "a prefill may start over whatever is forced"
    )
    engine.close()


def test_layers_whose_loads_cannot_be_hidden_are_not_offloaded_and_the_reason_is_reported(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    requests = wants(["llama"], 6)
    slow = slot(deep, ["llama"], models_there=1, kv_pressure="auto", remap=RemapSettings(), host_link_bytes_per_s=1.0)
    engine = loaded(deep, ["llama"], slow)
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) == 0
    assert gathered.tokens == undisturbed(requests)
    assert pool_of(engine).offloads_declined["not hidden"] > 0
    engine.close()


@pytest.mark.parametrize("action", ["auto", "refuse"])
def test_the_requester_waits_only_without_a_victim_or_if_that_is_forced(deep: Deep, action: KvPressure) -> None:
    names = ["llama", "qwen2"]
    slow = slot(deep, names, models_there=2, kv_pressure=action, remap=RemapSettings(), host_link_bytes_per_s=1.0)
    engine = loaded(deep, names, slow)
    for wanted in wants(["llama"], 2):
        engine.add(wanted)
    steps_until(engine, Gathered(), lambda: len(decoding_here(engine, "llama")) == 2)
    engine.add(wants(["qwen2"], 1)[0])
    asks = next(sequence for sequence in engine.requests if sequence.model == "qwen2")
    victim = decoding_here(engine, "llama")[1]
    may_leave = pressure_of(engine).on_shortage(Shortage(sequence=asks, tokens=200, victim=victim))
    assert (may_leave == "refuse") is (action == "refuse")
    assert pressure_of(engine).on_shortage(Shortage(sequence=asks, tokens=200, victim=None)) == "refuse"
    engine.close()


def test_kv_leaves_the_layers_that_an_active_model_must_wait_for(deep: Deep, undisturbed: Undisturbed) -> None:
    """Loads that were quick take an hour all at once."""
    requests = wants(["llama"], 6, max_tokens=16)  # with half as many, layers were back five tokens before the end
    hidden = RemapSettings(settle_s=0.0)
    quick = slot(deep, ["llama"], models_there=1, kv_pressure="auto", remap=hidden, host_link_bytes_per_s=1e15)
    engine = loaded(deep, ["llama"], quick)
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: sum(pool_of(engine).offloaded_layers.values()) >= 2)
    engine.weights.rate.s_per_byte = 1.0
    steps_until(engine, gathered, lambda: not pool_of(engine).offloaded_layers)
    assert engine.has_work(), "before the requests had ended by themselves"
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(requests)
    engine.close()


TIERS: tuple[Tier, ...] = ("IW-F", "IW-N", "NIW")


def decoding(engine: TorchEngine, name: str) -> TokenSequence:
    """The model's first sequence that is past its prefill; all of the model's weights are there."""

    def is_there() -> bool:
        return bool(decoding_here(engine, name)) and name in engine.stats().resident_models

    if not is_there():
        steps_until(engine, Gathered(), is_there)
    return decoding_here(engine, name)[0]


def test_a_victim_that_would_wait_for_its_turn_anyway_is_known_to(deep: Deep) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2, kv_pressure="swap"), clock=lambda: 100.0)
    for wanted in wants(names, 1, max_tokens=30):
        engine.add(wanted)
    steps_until(engine, Gathered(), lambda: all(decoding_here(engine, name) for name in names))
    engine.step()
    running = engine.state.round.model
    assert running is not None
    other = next(name for name in names if name != running)
    asks = decoding(engine, running)
    idle = {
        name: pressure_of(engine).facts(Shortage(sequence=asks, tokens=90, victim=decoding(engine, name)), None).victim
        for name in names
    }
    assert idle[running] is not None
    assert idle[running].idle_s == 0.0
    assert idle[other] is not None
    assert idle[other].idle_s == idle_s(engine.state.round, other, 100.0) > 0
    engine.close()


def test_each_direction_of_the_host_link_has_its_own_rate(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rates, "measured_rates", lambda buffer: (1e6, 1e3))
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    engine.add(wants(["llama"], 1)[0])
    sequence = decoding(engine, "llama")
    facts = pressure_of(engine).facts(Shortage(sequence=sequence, tokens=90, victim=sequence), None)
    assert (facts.in_bytes_per_s, facts.out_bytes_per_s) == (pytest.approx(1e6), pytest.approx(1e3))
    engine.close()


def test_layers_of_models_with_less_urgent_requests_are_offloaded_first(deep: Deep) -> None:
    """Without requests, gemma3, the most recently used, would go before qwen2."""
    names = ["qwen2", "gemma3_text", "llama"]
    engine = loaded(deep, names, slot(deep, names, models_there=3))
    for wanted in wants(names[:2], 1):
        engine.add(wanted)
        drain_outputs(engine)
    engine.add(wants(["llama"], 1, max_tokens=30)[0])
    asks = decoding(engine, "llama")

    def priorities() -> dict[str, int]:
        return {model.model: model.priority for model in pressure_of(engine)._model_facts()}

    by_tier = []
    for tier in TIERS:
        engine.add(request("late", [5, 6, 7], instance_id="gemma3_text", tier=tier))
        by_tier.append(priorities()["gemma3_text"])
        assert priorities()["qwen2"] == 0
        engine.cancel("late")
    assert 0 < by_tier[2] < by_tier[1] < by_tier[0]
    assert priorities()["gemma3_text"] == 0
    engine.add(request("late", [5, 6, 7], instance_id="gemma3_text", tier="NIW"))
    assert pressure_of(engine).on_shortage(Shortage(sequence=asks, tokens=120, victim=None)) == "remap"
    assert set(pool_of(engine).offloaded_layers) == {"qwen2"}
    engine.close()


def test_layers_of_active_models_are_offloaded_round_robin(deep: Deep) -> None:
    """Spatial sharing, once steps of both were timed."""
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2))
    for max_tokens in (2, 30):
        drain_outputs(engine)
        for wanted in wants(names, 1, max_tokens=max_tokens):
            engine.add(wanted)
    sequences = [decoding(engine, name) for name in names]
    assert all(sequence in decoding_here(engine, sequence.model) for sequence in sequences)
    assert pressure_of(engine).on_shortage(Shortage(sequence=sequences[0], tokens=150, victim=None)) == "remap"
    offloaded = pool_of(engine).offloaded_layers
    assert offloaded.keys() == set(names)
    assert abs(offloaded["llama"] - offloaded["qwen2"]) <= 1
    engine.close()


def test_a_busy_model_that_is_not_loaded_fits_with_offloaded_layers(deep: Deep, undisturbed: Undisturbed) -> None:
    """Memory for two: gemma3, which is idle, keeps its region for qwen2, so that llama's own layers are offloaded."""
    names = ["gemma3_text", "llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2))
    gathered = Gathered()
    first, burst, late = wants(names[:1], 1), wants(["llama"], 6), wants(["qwen2"], 1)
    for wanted in first:
        engine.add(wanted)
    gathered.take(drain_outputs(engine))
    engine.add(burst[0])
    steps_until(engine, gathered, lambda: bool(decoding_here(engine, "llama")))
    for wanted in [*burst[1:], *late]:
        engine.add(wanted)
    steps_until(
        engine, gathered, lambda: "qwen2" in engine.stats().resident_models and bool(pool_of(engine).offloaded_layers)
    )
    assert set(pool_of(engine).offloaded_layers) == {"llama"}
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed([*first, *burst, *late])
    engine.close()


def test_a_slot_of_one_place_keeps_it_for_the_next_model(deep: Deep) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=1))
    engine.add(wants(["llama"], 1, max_tokens=30)[0])
    shortage = Shortage(sequence=decoding(engine, "llama"), tokens=120, victim=None)
    engine.add(wants(["qwen2"], 1)[0])
    assert pressure_of(engine).on_shortage(shortage) != "remap"
    assert pool_of(engine).offloads_declined == {"switching": 1}
    engine.cancel("qwen2-0")
    assert pressure_of(engine).on_shortage(shortage) == "remap"
    engine.close()
