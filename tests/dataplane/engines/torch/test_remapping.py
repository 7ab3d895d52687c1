"""KV in the places of layers: models give them up, run without them, get them back, and no token shows it."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dataplane.engines.core.remapping import control
from dataplane.engines.core.remapping.caps import Cap
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.memory.models import TorchModel
from dataplane.memory.events import Event, TransferError
from tests.dataplane.engines.torch.deep import (
    KV_SLABS,
    QUICK,
    Deep,
    Undisturbed,
    drain_outputs,
    loaded,
    pool_of,
    run_dry,
    slot,
    steps_until,
    wants,
)
from tests.dataplane.engines.torch.drive import Gathered, request
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

NAMES = ("llama", "qwen2", "gemma3_text")
"""qwen2 has tied embeddings; mixtral, which has experts, is compared with transformers below."""


@pytest.mark.parametrize("mixed", [False, True])
def test_an_active_model_runs_on_while_its_layers_come_and_go(
    deep: Deep, undisturbed: Undisturbed, *, mixed: bool
) -> None:
    requests = wants(["llama"], 8)
    turns = replace(QUICK, mixed_batches=mixed)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, turns=turns))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    most = run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(requests)
    assert ("mixed" in {one.kind for one in pool_of(engine).time_slices}) is mixed
    assert most >= 3, "several layers deep"
    engine.step()
    pool = pool_of(engine)
    assert (pool.offloaded_layers, pool.slabs["kv"], pool.slabs["moving"]) == ({}, 0, 0)
    assert pool.layers_moved["offloaded"] == pool.layers_moved["reclaimed"] >= most
    assert pool.pressure_actions["remap"] > 0
    engine.close()


@pytest.mark.parametrize("length", [5, 25])
def test_kv_that_leaves_the_memory_of_a_layer_does_not_come_back(
    deep: Deep, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Where loads are no longer hidden the layer is reclaimed once, for good. Else KV would be evicted and swapped in
    again before each step, and no request would ever make a token.
    """
    chance = random.Random(length)
    prompts = [chance.choices(range(3, VOCABULARY), k=length + number) for number in range(4)]
    asked = [request(f"r{number}", prompt, instance_id="llama", max_tokens=12) for number, prompt in enumerate(prompts)]
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, prefill_tokens_per_step_max=8))
    for one in asked:
        engine.add(one)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: bool(pool_of(engine).offloaded_layers))
    monkeypatch.setattr(control, "choose_cap", lambda *_: Cap(layers=0, reason="not hidden"))
    steps_until(engine, gathered, lambda: not pool_of(engine).offloaded_layers)
    assert engine.has_work(), "KV left the layer for it, and not because all requests had ended"
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(asked)
    engine.close()


def test_inactive_models_offload_first_and_their_prefill_begins_before_all_layers_are_loaded(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2, remap=RemapSettings(capped=False, settle_s=1e9)))
    gathered = Gathered()
    first, second = wants(["llama"], 6), wants(["qwen2"], 1)
    engine.add(second[0])
    gathered.take(drain_outputs(engine))
    for wanted in first:
        engine.add(wanted)
    steps_until(engine, gathered, lambda: pool_of(engine).offloaded_layers.get("qwen2", 0) >= 2)
    assert "llama" not in pool_of(engine).offloaded_layers
    late = request("late", second[0].prompt, instance_id="qwen2", max_tokens=4, ignore_eos=True)
    engine.add(late)
    steps_until(engine, gathered, lambda: "late" in gathered.tokens)
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed([*first, *second, late])
    engine.close()


@pytest.mark.parametrize("models_there", [1, 3])
def test_tokens_are_the_same_through_remap_deepen_revert_switch_swap_cancel_unload_and_faults(
    deep: Deep, undisturbed: Undisturbed, models_there: int
) -> None:
    """A burst of one model has it give up layers, then the others come: where the slot has not room for all, KV must
    leave the places of layers whenever another's turn comes. Then a model is unloaded that has lent layers, with KV in
    them, and comes again.
    """
    chance = random.Random(models_there)

    def stream(name: str) -> CopyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        return FaultyStream(inners, random.Random(f"{models_there} {name}"), delay_s=0.001, fail_share=0.15)

    engine = loaded(deep, NAMES, slot(deep, NAMES, models_there=models_there), stream)
    burst, others = wants(NAMES[:1], 5), wants(NAMES[1:], 2)
    chance.shuffle(others)
    gathered, cancelled = Gathered(), set()
    for wanted in burst:
        engine.add(wanted)
    steps_until(engine, gathered, lambda: sum(pool_of(engine).offloaded_layers.values()) >= 2)
    for wanted in others:
        engine.add(wanted)
        for _ in range(chance.randrange(6)):
            gathered.take(engine.step())
        victim = chance.choice([*burst, *others]).request_id
        if chance.random() < 0.3 and victim not in gathered.finished:
            engine.cancel(victim)
            cancelled.add(victim)
        engine.check()
    lender = max(pool_of(engine).offloaded_layers, key=pool_of(engine).offloaded_layers.__getitem__, default=NAMES[0])
    engine.unload(lender)
    engine.check()
    gathered.take(engine.step())
    engine.load(lender, spec_of(lender, deep(lender)))
    again = request("again", others[0].prompt, instance_id=lender, max_tokens=6, ignore_eos=True)
    engine.add(again)
    run_dry(engine, gathered)
    expected = undisturbed([*burst, *others, again])
    assert all(f"instance {lender} was unloaded" in error for error in gathered.errors.values())
    for request_id in set(expected) - cancelled - set(gathered.errors):
        assert gathered.tokens[request_id] == expected[request_id], request_id
    pool = pool_of(engine)
    assert (pool.slabs["kv"], pool.slabs["moving"]) == (0, 0)
    engine.close()


@pytest.mark.parametrize("layers_too", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_same_while_kv_has_the_place_of_the_next_model_and_gives_it_back(
    deep: Deep, undisturbed: Undisturbed, seed: int, *, layers_too: bool
) -> None:
    """Memory for two models, slices by deadlines, and transfers that are late or fail: KV of three models comes to the
    place, also while layers are offloaded, and leaves it whenever a model needs it.
    """
    chance = random.Random(seed)

    def stream(name: str) -> CopyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        return FaultyStream(inners, random.Random(f"{seed} {name}"), delay_s=0.001, fail_share=0.1)

    remap = RemapSettings(capped=False, settle_s=0.0, spare_layers=0.0, share_max=0.9 if layers_too else 0.0)
    turns = replace(QUICK, time_slices="deadlines")
    engine = loaded(deep, NAMES, slot(deep, NAMES, models_there=2, remap=remap, turns=turns), stream)
    asked = wants(NAMES, 5)
    chance.shuffle(asked)
    gathered, lent, most = Gathered(), Counter[bool](), 0
    for wanted in asked:
        engine.add(wanted)
        for _ in range(chance.randrange(8)):
            gathered.take(engine.step())
            engine.check()
    while engine.has_work():
        gathered.take(engine.step())
        engine.check()
        lent[engine.arena.kv_from < engine.arena.weights_slabs] += 1
        most = max(most, engine.arena.kv_slabs)
    assert gathered.tokens == undisturbed(asked)
    assert most > KV_SLABS, "KV had memory of weights"
    assert lent[True]
    assert engine.arena.kv_from == engine.arena.weights_slabs, "the last model has the slot to itself"
    assert engine.arena.stranded_slabs <= set(engine.kv.clearable_slabs()), "only cached prefixes are left there"
    engine.close()


def test_a_model_without_all_its_layers_waits_for_its_host_copy_where_that_left(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: sum(pool_of(engine).offloaded_layers.values()) >= 2)
    engine.host_models.release_copy(engine.models["llama"].weights)
    assert run_dry(engine, gathered) >= 2
    assert gathered.tokens == undisturbed(requests)
    engine.close()


class HeldStream:
    """Copies what it is given as long as nobody holds it. Who waits for what is held back learns that it failed."""

    def __init__(self) -> None:
        self._inner = ThreadStream("held")
        self.held = False

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        return HeldBack() if self.held else self._inner.submit(copies, after)

    def close(self) -> None:
        self._inner.close()


class HeldBack:
    """The event of copies that are never made."""

    error: BaseException | None = None

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise TransferError("it was held back")


def test_a_model_that_is_prefetched_does_not_hold_up_the_layers_of_the_one_that_runs(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    streams: dict[str, CopyStream] = {}

    def stream(name: str) -> CopyStream:
        return streams.setdefault(name, HeldStream() if name == "weights" else ThreadStream(name))

    engine = loaded(deep, names, slot(deep, names, models_there=2, remap=RemapSettings(capped=False)), stream)
    gathered, requests = Gathered(), wants(["llama"], 6)
    for wanted in requests:
        engine.add(wanted)
    steps_until(engine, gathered, lambda: pool_of(engine).offloaded_layers.get("llama", 0) >= 2)
    weights = streams["weights"]
    assert isinstance(weights, HeldStream)
    weights.held = True
    assert engine.weights.load(engine.models["qwen2"].weights, 0.0, keep="llama")
    loads_before = engine.weights.remapped(engine.models["llama"].weights).loads_total
    gathered.take(drain_outputs(engine))
    assert engine.weights.remapped(engine.models["llama"].weights).loads_total > loads_before
    assert gathered.tokens == undisturbed(requests)
    engine.close()


def test_a_step_that_waits_for_its_own_offloaded_layers_does_not_change_the_estimate(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would count as computing, which then seems to hide more loads."""
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    taught: list[int] = []
    observe_decode, observe_prefill = TorchModel.observe_decode, TorchModel.observe_prefill

    def decoded(model: TorchModel, took_s: float, context_tokens: int, batch: int) -> None:
        taught.append(pool_of(engine).offloaded_layers.get(model.name, 0))
        observe_decode(model, took_s, context_tokens, batch)

    def prefilled(model: TorchModel, took_s: float, tokens: int, squared_tokens: int) -> None:
        taught.append(pool_of(engine).offloaded_layers.get(model.name, 0))
        observe_prefill(model, took_s, tokens, squared_tokens)

    monkeypatch.setattr(TorchModel, "observe_decode", decoded)
    monkeypatch.setattr(TorchModel, "observe_prefill", prefilled)
    for wanted in wants(["llama"], 6):
        engine.add(wanted)
    assert run_dry(engine, Gathered()) > 0
    assert set(taught) == {0}
    engine.close()


def test_a_load_that_never_comes_fails_the_models_requests_and_nothing_else(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    streams: dict[str, FaultyStream] = {}

    def stream(name: str) -> CopyStream:
        streams[name] = FaultyStream([ThreadStream(name)], random.Random(0), fails_in_a_row_max=10**6)
        return streams[name]

    engine = loaded(deep, names, slot(deep, names, models_there=2), stream)
    for wanted in wants(["llama"], 6):
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: pool_of(engine).offloaded_layers.get("llama", 0) >= 2)
    streams["layers"].fail_share = 1.0
    steps_until(engine, gathered, lambda: bool(gathered.errors))
    streams["layers"].fail_share = 0.0
    other = wants(["qwen2"], 1)
    engine.add(other[0])
    run_dry(engine, gathered)
    assert all("the weights do not arrive" in error for error in gathered.errors.values())
    assert gathered.tokens["qwen2-0"] == undisturbed(other)["qwen2-0"]
    engine.close()


def test_the_tokens_are_those_of_transformers(deep: Deep) -> None:
    requests = wants(["mixtral"], 6, max_tokens=6)
    engine = loaded(deep, ["mixtral"], slot(deep, ["mixtral"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) > 0
    for wanted in requests:
        expected = greedy_tokens(deep("mixtral"), wanted.prompt, wanted.max_tokens)
        assert gathered.tokens[wanted.request_id][: len(expected)] == expected
    engine.close()
