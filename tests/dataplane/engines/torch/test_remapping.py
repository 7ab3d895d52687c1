"""KV in the places of layers: models give them up, run without them, get them back, and no token shows it."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine import EngineRequest, PoolStats
from dataplane.engines.pressure import Shortage
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import KvPressure, TorchEngineSettings
from dataplane.engines.torch.streams import CopyStream, ThreadStream
from dataplane.remapping.settings import RemapSettings
from dataplane.turns.decode import DecodeSettings
from dataplane.turns.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import Gathered, drain, request
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, save_tiny, spec_of

LAYERS = 7
NAMES = ("llama", "qwen2", "gemma3_text")
"""qwen2 has tied embeddings; mixtral, which has experts, is compared with transformers below."""
SLAB_BYTES = 2**13
KV_SLABS = 12
QUICK = TurnSettings(decode=DecodeSettings(quota_min_s=0.001, quota_max_s=0.005))
EAGER = RemapSettings(capped=False, settle_s=0.0, spare_layers=0.0)
"""Gives up layers whether or not that can be hidden, and takes them back at once."""
Deep = Callable[[str], Path]
Undisturbed = Callable[[Sequence[EngineRequest]], dict[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """The folder of an architecture's checkpoint with `LAYERS` layers."""
    root = tmp_path_factory.mktemp("deep")

    def folder(name: str) -> Path:
        target = root / name
        return target if target.exists() else save_tiny(name, target, num_hidden_layers=LAYERS)

    return folder


def slot(deep: Deep, names: Sequence[str], *, models_there: int, **changes: Any) -> TorchEngineSettings:
    """Weights for so many of the models, and little KV."""
    given: dict[str, Any] = {
        "slab_bytes": SLAB_BYTES,
        "block_tokens": 4,
        "host_kv_bytes": 2**22,
        "turns": QUICK,
        "kv_pressure": "remap",
        "remap": EAGER,
        **changes,
    }
    one = slot_for_one([deep(name) for name in names], kv_bytes=KV_SLABS * SLAB_BYTES, slab_bytes=SLAB_BYTES)
    return TorchEngineSettings(weights_bytes=models_there * one.weights_bytes, kv_bytes=KV_SLABS * SLAB_BYTES, **given)


def loaded(
    deep: Deep,
    names: Sequence[str],
    settings: TorchEngineSettings,
    make_stream: Callable[[str], CopyStream] | None = None,
) -> TorchEngine:
    engine = TorchEngine(settings, time.monotonic, make_stream)
    for name in names:
        engine.load(name, spec_of(name, deep(name)))
    return engine


def wants(names: Sequence[str], each: int, *, max_tokens: int = 8) -> list[EngineRequest]:
    chance = random.Random(1)
    return [
        request(
            f"{name}-{number}",
            [chance.randrange(3, VOCABULARY) for _ in range(5 + 4 * (number % 5))],
            instance_id=name,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for number in range(each)
        for name in names
    ]


@pytest.fixture(scope="module")
def undisturbed(deep: Deep) -> Undisturbed:
    """Tokens by request: one request at a time on a slot that is large enough. The same question is asked once."""
    known: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(requests: Sequence[EngineRequest]) -> dict[str, tuple[int, ...]]:
        questions = {one.request_id: (one.instance_id, one.prompt, one.max_tokens) for one in requests}
        new = [one for one in requests if questions[one.request_id] not in known]
        for name in sorted({one.instance_id for one in new}):
            engine = loaded(deep, [name], slot(deep, [name], models_there=1, kv_pressure="swap"))
            for one in (one for one in new if one.instance_id == name):
                engine.add(one)
                known[questions[one.request_id]] = drain(engine).tokens[one.request_id]
            engine.close()
        return {request_id: known[question] for request_id, question in questions.items()}

    return tokens


def pool_of(engine: TorchEngine) -> PoolStats:
    pool = engine.stats().pool
    assert pool is not None
    return pool


def run_dry(engine: TorchEngine, gathered: Gathered, *, steps_max: int = 20_000) -> int:
    """Step to the end, and look through the books on the way; how many layers were given up at most."""
    most = 0
    for number in range(steps_max):
        if not engine.has_work():
            engine.check()
            return most
        gathered.take(engine.step())
        most = max(most, sum(engine._weights.given_up.values()))
        if number % 4 == 0:
            engine.check()
    raise AssertionError(f"not done after {steps_max} steps")


def steps_until(engine: TorchEngine, gathered: Gathered, reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        gathered.take(engine.step())
        if reached():
            return
    raise AssertionError("never reached")


def test_an_active_model_runs_on_while_its_layers_come_and_go(deep: Deep, undisturbed: Undisturbed) -> None:
    requests = wants(["llama"], 8)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    most = run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(requests)
    assert most >= 3, "several layers deep"
    engine.step()
    pool = pool_of(engine)
    assert (pool.given_up, pool.slabs["kv"], pool.slabs["moving"]) == ({}, 0, 0)
    assert pool.layers_moved["lent"] == pool.layers_moved["taken back"] >= most
    assert pool.relief["remap"] > 0
    engine.close()


def test_more_requests_run_together_than_without(deep: Deep) -> None:
    running = {}
    for way in ("remap", "swap"):
        engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure=way))
        for wanted in wants(["llama"], 8):
            engine.add(wanted)
        most = 0
        while engine.has_work():
            engine.step()
            most = max(most, len(engine._models["llama"].decoding_here))
        running[way] = most
        engine.close()
    assert running["remap"] > running["swap"]


def test_inactive_models_give_up_first_and_their_prefill_begins_before_all_layers_are_back(
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
    steps_until(engine, gathered, lambda: engine._weights.given_up.get("qwen2", 0) >= 2)
    assert "llama" not in engine._weights.given_up
    late = request("late", second[0].prompt, instance_id="qwen2", max_tokens=4, ignore_eos=True)
    engine.add(late)
    steps_until(engine, gathered, lambda: "late" in gathered.tokens)
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed([*first, *second, late])
    engine.close()


def drain_outputs(engine: TorchEngine) -> list[Any]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("models_there", [1, 3])
def test_tokens_are_the_same_through_remap_revert_switch_cancel_and_faults(
    deep: Deep, undisturbed: Undisturbed, models_there: int
) -> None:
    """A burst of one model has it give up layers, then the others come: where the slot has not room for all, KV must
    leave the places of layers whenever another's turn comes.
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
    steps_until(engine, gathered, lambda: sum(engine._weights.given_up.values()) >= 2)
    for wanted in others:
        engine.add(wanted)
        for _ in range(chance.randrange(6)):
            gathered.take(engine.step())
        victim = chance.choice([*burst, *others]).request_id
        if chance.random() < 0.3 and victim not in gathered.finished:
            engine.cancel(victim)
            cancelled.add(victim)
        engine.check()
    run_dry(engine, gathered)
    expected = undisturbed([*burst, *others])
    assert gathered.errors == {}
    for request_id in set(expected) - cancelled:
        assert gathered.tokens[request_id] == expected[request_id], request_id
    pool = pool_of(engine)
    assert (pool.slabs["kv"], pool.slabs["moving"]) == (0, 0)
    engine.close()


@pytest.mark.parametrize("way", ["swap", "recompute", "refuse"])
def test_each_way_out_can_be_forced(deep: Deep, undisturbed: Undisturbed, way: KvPressure) -> None:
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure=way))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) == 0
    assert gathered.tokens == undisturbed(requests)
    extra, pool = engine.stats().extra, pool_of(engine)
    assert pool.relief[way] > 0
    assert (extra["recomputed"] > 0) is (way == "recompute")
    engine.close()


def test_what_cannot_be_hidden_is_not_given_up_and_the_reason_is_told(deep: Deep, undisturbed: Undisturbed) -> None:
    """Loads that take an hour."""
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure="auto", remap=RemapSettings()))
    engine._weights._rate.s_per_byte = 1.0
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) == 0
    assert gathered.tokens == undisturbed(requests)
    assert pool_of(engine).not_remapped["not hidden"] > 0
    engine.close()


@pytest.mark.parametrize("way", ["auto", "refuse"])
def test_who_asks_waits_only_where_nobody_has_to_make_way_or_where_that_is_forced(deep: Deep, way: KvPressure) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2, kv_pressure=way, remap=RemapSettings()))
    engine._weights._rate.s_per_byte = 1.0  # no load is hidden
    for wanted in wants(["llama"], 2):
        engine.add(wanted)
    steps_until(engine, Gathered(), lambda: len(engine._models["llama"].decoding_here) == 2)
    engine.add(wants(["qwen2"], 1)[0])
    asks = next(sequence for sequence in engine._requests if sequence.model == "qwen2")
    victim = engine._models["llama"].decoding_here[1]
    may_leave = engine._relief.relieve(Shortage(sequence=asks, tokens=200, victim=victim))
    assert (may_leave == "refuse") is (way == "refuse")
    assert engine._relief.relieve(Shortage(sequence=asks, tokens=200, victim=None)) == "refuse"
    engine.close()


def test_kv_leaves_the_layers_that_an_active_model_must_wait_for(deep: Deep, undisturbed: Undisturbed) -> None:
    """Loads that were quick take an hour all at once."""
    requests = wants(["llama"], 6)
    hidden = RemapSettings(settle_s=0.0)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1, kv_pressure="auto", remap=hidden))
    engine._weights._rate.s_per_byte = 1e-15
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: sum(engine._weights.given_up.values()) >= 2)
    engine._weights._rate.s_per_byte = 1.0
    steps_until(engine, gathered, lambda: not engine._weights.given_up)
    assert engine.has_work(), "before the requests had ended by themselves"
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(requests)
    engine.close()


def test_a_model_without_all_its_layers_waits_for_its_host_copy_where_that_left(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: sum(engine._weights.given_up.values()) >= 2)
    engine._host._part(engine._models["llama"].weights)
    assert run_dry(engine, gathered) >= 2
    assert gathered.tokens == undisturbed(requests)
    engine.close()


def test_a_load_that_never_comes_fails_the_models_requests_and_nothing_else(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2))
    for wanted in wants(["llama"], 6):
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: engine._weights.given_up.get("llama", 0) >= 2)
    good = engine._weights._stream
    engine._weights._stream = FaultyStream([good], random.Random(0), fail_share=1.0, fails_in_a_row_max=10**6)
    steps_until(engine, gathered, lambda: bool(gathered.errors))
    engine._weights._stream = good
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
