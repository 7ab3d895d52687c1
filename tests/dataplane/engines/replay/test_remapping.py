"""KV of a replayed slot in offloaded layers: offloading, waiting for loads, reclaiming, and the statistics."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.core.pressure import KvPressure, Shortage
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import PoolStats
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.kv import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.weights import Weights, WeightsMemory
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.replay.replayed import (
    PROFILE,
    SETTINGS,
    FakeTime,
    drain,
    engine_with,
    request,
    run_one,
    spec,
    tokens,
)

LAYERS = 10
EAGER = RemapSettings(capped=False, settle_s=0.0, spare_layers=0.0)
"""Gives up layers whether or not that can be hidden, and takes them back at once."""
QUICK = replace(PROFILE, pcie_bytes_per_s=1e6)
"""A layer of 50 bytes comes in 0.1 ms; a decode step takes at least 20."""
MANY = [request(f"r{number}", prompt=20, max_tokens=10) for number in range(8)]
"""240 tokens of KV; the memory holds 100."""


def slot(action: KvPressure = "remap", **changes: Any) -> ReplaySettings:
    return replace(SETTINGS, kv_pressure=action, layers=LAYERS, **{"profile": QUICK, **changes})


def pool_of(engine: ReplayEngine) -> PoolStats:
    pool = engine.stats().pool
    assert pool is not None
    return pool


def check(engine: ReplayEngine) -> None:
    """No byte is lost or counted twice, and KV in layers of evicted models takes memory from weights."""
    pool, weights, kv = pool_of(engine), engine.weights, engine.kv
    assert sum(pool.slabs.values()) == SETTINGS.weights_bytes + SETTINGS.kv_bytes
    assert kv.used_bytes == sum(shape.used_bytes for shape in pool.kv)
    assert weights.used_bytes + max(kv.out_of_region_bytes - weights.offloaded_bytes, 0) <= weights.capacity_bytes
    assert weights.capacity_bytes + kv.capacity_bytes == SETTINGS.weights_bytes + SETTINGS.kv_bytes
    assert weights.capacity_bytes >= max(model.weights_bytes for model in engine.models.values())
    assert all(0 < layers < LAYERS for layers in pool.offloaded_layers.values())


def run(engine: ReplayEngine) -> tuple[dict[str, list[int]], int, int]:
    """Tokens by request; the most sequences that decoded together, and the most layers offloaded."""
    made: dict[str, list[int]] = {}
    batch = deep = 0
    while engine.has_work():
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        check(engine)
        batch = max(batch, *(len(model.decoding_here) for model in engine.models.values()))
        deep = max(deep, sum(pool_of(engine).offloaded_layers.values()))
    return made, batch, deep


def test_layers_are_offloaded_while_their_loads_are_hidden_and_reclaimed() -> None:
    batches, ends_s = {}, {}
    for action in ("remap", "swap"):
        engine, time = engine_with(slot(action))
        for one in MANY:
            engine.add(one)
        made, batches[action], deep = run(engine)
        ends_s[action] = time.now_s
        assert made == {one.request_id: tokens(run_one(one)) for one in MANY}
        assert (deep > 0) is (action == "remap")
    assert batches["remap"] > batches["swap"]
    assert ends_s["remap"] < ends_s["swap"]


def test_reversion_is_by_the_controller_and_is_counted() -> None:
    engine, time = engine_with(slot(remap=RemapSettings(settle_s=5.0)))
    for one in MANY:
        engine.add(one)
    _, _, deep = run(engine)
    assert sum(pool_of(engine).offloaded_layers.values()) == deep > 0, "what was offloaded last has not settled"
    assert engine.stats().resident_models == (), "it is not whole"
    time.sleep(5.0)
    engine.step()
    time.sleep(1.0)
    pool = pool_of(engine)
    assert (pool.offloaded_layers, engine.stats().resident_models) == ({}, ("a",))
    assert pool.layers_moved["offloaded"] == pool.layers_moved["reclaimed"] >= deep
    assert pool.pressure_actions["remap"] > 0


def test_layers_whose_loads_cannot_be_hidden_are_not_offloaded_and_the_reason_is_reported() -> None:
    engine, _ = engine_with(slot("auto", profile=PROFILE))  # a layer takes 0.1 s
    for one in MANY:
        engine.add(one)
    _, _, deep = run(engine)
    assert deep == 0
    assert set(pool_of(engine).offloads_declined) >= {"not hidden"}


@pytest.mark.parametrize("action", ["swap", "recompute", "refuse"])
def test_each_action_can_be_forced(action: KvPressure) -> None:
    engine, _ = engine_with(slot(action))
    for one in MANY:
        engine.add(one)
    made, _, deep = run(engine)
    assert made == {one.request_id: tokens(run_one(one)) for one in MANY}
    assert deep == 0
    assert pool_of(engine).pressure_actions[action] > 0


def weights(model: str = "a", size_bytes: int = 500) -> Weights:
    return Weights(model=model, size_bytes=size_bytes, switch_s=1.0, layers=LAYERS)


def rotation(offloaded: int, frames: int = 1) -> Rotation:
    return Rotation(layers=LAYERS, offloaded=offloaded, frames=frames)


def test_a_step_waits_for_loads_that_computing_does_not_hide() -> None:
    """Two layers share a place: each gap of 5 layers, less one, must take the 0.1 s of a load."""
    memory = WeightsMemory(1000)
    memory.load(weights(), 0.0)
    memory.rotate("a", rotation(1))
    assert memory.ends_s(weights(), 0.25, 10.0) == 10.25, "4 layers of 0.025 s: just hidden"
    assert memory.ends_s(weights(), 0.20, 20.0) == pytest.approx(20.24), "0.02 s late, twice"
    memory.load(weights("b"), 30.0)
    assert memory.ends_s(weights(), 0.25, 30.0) == pytest.approx(30.4), "both loads, concurrently with b"


def test_layers_that_came_back_are_waited_for() -> None:
    memory = WeightsMemory(1000)
    memory.load(weights(), 0.0)
    memory.rotate("a", rotation(3))
    memory.reclaim("a", 3, 10.0)
    assert memory.ends_s(weights(), 0.1, 10.0) == pytest.approx(10.31), "three loads, and then the last layer runs"
    assert (memory.resident_models(10.2), memory.resident_models(10.4)) == ((), ("a",))


def test_kv_in_layers_whose_model_left_keeps_others_out() -> None:
    memory, time = WeightsMemory(1000), FakeTime()
    kv = ReplayKvMemory(100, 0, time.clock, memory)
    memory.load(weights(), 0.0)
    memory.rotate("a", rotation(4))
    mine = SequenceKv(bytes_per_token=10, bytes_per_s=100.0)
    assert kv.grow(mine, 30)
    assert not kv.grow(mine, 31)
    assert (kv.out_of_region_bytes, kv.missing_bytes(mine, 35)) == (200, 50)
    other, large = weights("b"), weights("c", 900)
    assert memory.fits_with(other, others=["a"], out_of_region_bytes=200)
    assert not memory.fits_with(other, others=["a"], out_of_region_bytes=201), "a byte more than is offloaded"
    assert memory.load(large, 5.0, out_of_region_bytes=200) is None
    assert memory.offloaded == {"a": 4}, "nobody leaves in vain"
    memory.evict("a")
    assert (kv.free_bytes, kv.spare_bytes) == (0, -200)
    assert memory.fit([weights("d", 800)], out_of_region_bytes=kv.out_of_region_bytes)
    assert not memory.fit([weights("d", 801)], out_of_region_bytes=kv.out_of_region_bytes)


def test_kv_is_evicted_for_a_model_that_is_to_run() -> None:
    """Room for one model: the KV in its layers has to leave before the other comes."""
    large = {name: spec(name, weights_bytes=900) for name in "ab"}
    engine, _ = engine_with(slot(remap=EAGER), **large)
    first = [request(f"a{number}", "a", prompt=20, max_tokens=30) for number in range(6)]
    for one in first:
        engine.add(one)
    while not pool_of(engine).offloaded_layers or engine.kv.out_of_region_bytes <= 200:
        engine.step()
    late = request("b0", "b", prompt=5, max_tokens=3)
    engine.add(late)
    made, _, _ = run(engine)
    assert made["b0"] == tokens(run_one(late, **large))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["IW-F", "IW-N", "NIW"]),
            st.integers(1, 60),
            st.integers(1, 40),
            st.integers(0, 8),
            st.sampled_from(["", "", "", "cancel", "unload"]),
        ),
        min_size=2,
        max_size=9,
    ),
    st.sampled_from(["remap", "auto"]),
    st.sampled_from([EAGER, replace(EAGER, reverts=False), RemapSettings()]),
    st.sampled_from([0, 10_000]),
    st.sampled_from(get_args(TimeSlices)),
)
@settings(max_examples=30)
def test_in_any_order_no_token_changes_and_all_come_to_an_end(
    shapes: list[tuple[str, Tier, int, int, int, str]],
    action: KvPressure,
    remap: RemapSettings,
    host_kv_bytes: int,
    time_slices: TimeSlices,
) -> None:
    turns = TurnSettings(time_slices=time_slices)
    given = slot(action, remap=remap, host_kv_bytes=host_kv_bytes, turns=turns)
    engine, _ = engine_with(given, **{name: spec(name) for name in "abc"})
    asked, made, ended = [], {}, set()

    def step(*, checks: bool = True) -> None:
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        if checks:
            check(engine)

    for number, (model, tier, prompt, count, steps, then) in enumerate(shapes):
        asked.append(request(f"r{number}", model, prompt=prompt, max_tokens=count, tier=tier))
        engine.add(asked[-1])
        for _ in range(steps):
            step()
        if then == "cancel":
            engine.cancel(asked[0].request_id)
            ended.add(asked[0].request_id)
        elif then == "unload":
            engine.unload(model)
            ended.update(one.request_id for one in asked if one.instance_id == model)
            engine.load(model, spec(model))
    for number in range(5000):
        if not engine.has_work():
            break
        step(checks=number % 8 == 0)
    for one in (one for one in asked if one.request_id not in ended):
        assert made[one.request_id] == tokens(run_one(one, **{one.instance_id: spec(one.instance_id)}))
    assert pool_of(engine).slabs["kv"] == 0
    drain(engine)


BY_DEADLINES = TurnSettings(time_slices="deadlines")
BUSY = [request(f"{name}{number}", name, prompt=20, max_tokens=30) for number in range(6) for name in "abc"]
"""900 tokens of KV of three models; the slot holds two, and KV of 100 tokens."""


def busy_slot(action: KvPressure, remap: RemapSettings) -> tuple[dict[str, list[int]], int, list[int]]:
    """Tokens by request, how many tokens were made together at most, and by which bytes KV had memory of weights."""
    given = slot(action, remap=remap, turns=BY_DEADLINES)
    engine, _ = engine_with(given, **{name: spec(name) for name in "abc"})
    for one in BUSY:
        engine.add(one)
    made: dict[str, list[int]] = {}
    together, lent = 0, []
    while engine.has_work():
        outputs = engine.step()
        together = max(together, len(outputs))
        for output in outputs:
            made.setdefault(output.request_id, []).extend(output.token_ids)
        check(engine)
        lent.append(SETTINGS.weights_bytes - engine.weights.capacity_bytes)
    return made, together, lent


def test_kv_has_the_place_of_the_next_model_on_a_slot_that_switches() -> None:
    expected = {one.request_id: tokens(run_one(one, a=spec("a"), b=spec("b"), c=spec("c"))) for one in BUSY}
    kept, batch, never = busy_slot("swap", EAGER)
    lent, larger_batch, places = busy_slot("remap", replace(EAGER, share_max=0.0))
    assert kept == lent == expected
    assert set(never) == {0}
    assert set(places) == {0, 500}, "the memory of one model"
    assert places[-1] == 0, "the last model has the slot to itself"
    assert larger_batch > batch


@pytest.mark.parametrize(("bytes_per_s", "lends"), [(5e3, False), (1e5, True)])
def test_a_place_is_lent_where_that_makes_more_tokens_than_a_prefetch(bytes_per_s: float, *, lends: bool) -> None:
    """A load takes 0.2 s, or 0.01."""
    link = replace(PROFILE, pcie_bytes_per_s=bytes_per_s)
    given = slot("auto", remap=RemapSettings(share_max=0.0), turns=BY_DEADLINES, profile=link)
    engine, _ = engine_with(given, **{name: spec(name) for name in "abc"})
    for one in BUSY[:6]:
        engine.add(one)
    run(engine)
    assert engine.stats().extra["preemptions"] > 0
    assert ("lend" in pool_of(engine).pressure_actions) is lends


def test_a_larger_model_that_is_loaded_finds_its_memory() -> None:
    given = slot("remap", remap=replace(EAGER, share_max=0.0), turns=BY_DEADLINES)
    engine, _ = engine_with(given, **{name: spec(name) for name in "abc"})
    for one in BUSY:
        engine.add(one)
    while engine.weights.capacity_bytes == SETTINGS.weights_bytes:
        engine.step()
    large = spec("d", weights_bytes=1000)
    engine.load("d", large)
    assert engine.weights.capacity_bytes == SETTINGS.weights_bytes
    late = request("late", "d", prompt=5, max_tokens=3)
    engine.add(late)
    made, _, _ = run(engine)
    assert made["late"] == tokens(run_one(late, d=large))


def test_a_request_waits_for_answers_only_whose_kv_is_on_the_device() -> None:
    """An answer whose KV was swapped out waits for memory itself, perhaps for what its model's next prompt would free:
    a slot whose prompts waited for it would do nothing any more.
    """
    engine, _ = engine_with(slot("swap"))
    decoding, waiting = MANY[:2]
    engine.add(decoding)
    (answer,) = engine.requests
    while not answer.prefilled:
        engine.step()
    engine.add(waiting)
    _, prompt = engine.requests
    shortage = Shortage(sequence=prompt, tokens=21, victim=None)
    assert engine.pressure.on_shortage(shortage) == "refuse"
    assert engine.kv.swap_out(answer.kv, answer.cached)
    assert engine.pressure.on_shortage(shortage) is None
