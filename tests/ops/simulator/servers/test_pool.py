"""The pool's slots in fast-forwards against the live engine step by step."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import get_args

import numpy as np
import pytest
from msgspec import structs

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import BaseModel, ModelSpec
from dataplane.protocol.tiers import Objective
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.schedule import TurnSettings
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.events import Events, Kind
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.slot_process import SlotProcess
from tests.ops.simulator.replayed import LATENCY, engine_request, profile_of, replay, spec_of

GIB = 2**30
TARGET = Objective(ttft_s=1.0, tbt_s=0.05)
MODELS = [spec_of(f"m{n}", weights_bytes=4 * GIB) for n in range(5)]


def settings_of(
    kv_tokens: int, batch_max: int, way: KvPressure, *, mixed: bool = False, time_slices: TimeSlices = "rounds"
) -> ReplaySettings:
    return ReplaySettings(
        profile=profile_of(LATENCY, bytes_per_s=16 * GIB),
        weights_bytes=(9 if way == "swap" else 15) * GIB,
        kv_bytes=kv_tokens * 1000,
        batch_max=batch_max,
        kv_pressure=way,
        remap=RemapSettings(capped=False, settle_s=0.0),
        layers=2000,
        turns=TurnSettings(mixed_batches=mixed, time_slices=time_slices),
    )


def traffic(count: int, rate_per_s: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        Request(
            number=number,
            arrived_s=float(arrived_s),
            model=f"m{rng.integers(5)}",
            origin="r",
            tier="IW-N",
            prompt_tokens=int(rng.integers(10, 800)),
            output_tokens=int(rng.integers(2, 300)),
        )
        for number, arrived_s in enumerate(times_s)
    ]


@pytest.mark.parametrize(
    ("rate_per_s", "kv_tokens", "batch_max", "prefilled", "way"),
    [
        (1.0, 10**6, 64, False, "swap"),
        (4.0, 10**6, 64, False, "swap"),
        (4.0, 3000, 64, False, "swap"),
        (1.0, 10**6, 64, True, "swap"),
        (4.0, 10**6, 2, True, "swap"),
        (4.0, 3000, 64, True, "swap"),
        (4.0, 3000, 64, False, "remap"),
        (4.0, 3000, 64, True, "remap"),
    ],
)
def test_a_slot_makes_the_tokens_of_the_live_engine_when_it_does(
    rate_per_s: float, kv_tokens: int, batch_max: int, prefilled: bool, way: KvPressure
) -> None:
    requests = traffic(40, rate_per_s, seed=2)
    slot, late = compare(requests, settings_of(kv_tokens, batch_max, way), prefilled=prefilled)
    pool = slot.engine.stats().pool
    assert pool is not None
    assert bool(pool.layers_moved.get("offloaded")) is (way != "swap")
    assert late == {False, True}, "some tokens are late, others are not"


@pytest.mark.parametrize("time_slices", get_args(TimeSlices))
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", [*range(11), 15, 22, 25, 43, 56, 71])
def test_slots_of_all_kinds_make_the_tokens_of_the_live_engine(
    seed: int, *, mixed: bool, time_slices: TimeSlices
) -> None:
    chance = Random(seed)
    way: KvPressure = chance.choice(["swap", "remap"])
    settings = settings_of(chance.choice([2000, 4000, 10**6]), 64, way, mixed=mixed, time_slices=time_slices)
    compare(traffic(25, chance.choice([0.5, 2.0, 8.0]), seed), settings, prefilled=chance.random() < 0.5)


@pytest.mark.parametrize("seed", [67, 146, 176, 224])
def test_slots_that_hold_all_models_and_take_turns_of_single_steps_do_too(seed: int) -> None:
    chance = Random(seed)
    way: KvPressure = chance.choice(["swap", "remap"])
    settings = settings_of(chance.choice([2000, 4000, 10**6]), chance.choice([64, 3]), way, mixed=True)
    requests = traffic(25, chance.choice([2.0, 8.0, 20.0]), seed)
    if chance.random() < 0.5:
        requests = [structs.replace(one, tier=chance.choice(["IW-N", "IW-F", "NIW"])) for one in requests]
    compare(requests, replace(settings, weights_bytes=30 * GIB), prefilled=chance.random() < 0.3)


@pytest.mark.parametrize("time_slices", get_args(TimeSlices))
def test_after_an_idle_step_no_kind_is_owed_time(time_slices: TimeSlices) -> None:
    """The last fast-forward is not that of the step before a prompt any more."""
    events = Events()
    first, second = (
        structs.replace(one, number=number, arrived_s=5.0 * number, model="m0")
        for number, one in enumerate(traffic(2, 1.0, seed=2))
    )
    made = {one.number: Served(request=one, target=TARGET) for one in (first, second)}
    settings, answers = settings_of(10**6, 64, "swap", time_slices=time_slices), answers_by_model(clairvoyant=True)
    slot = SlotProcess(
        0, "both", settings, events, lambda *_: None, lambda name: made[int(name)], answers=answers, renews=True
    )
    slot.load(MODELS)
    seen: list[tuple[float, float]] = []
    for one in (first, second):
        events.at(one.arrived_s, Kind.ARRIVAL, lambda one=one: slot.add(engine_request(one)))
    for at_s in (4.9, 5.0 + 1e-4):
        events.at(at_s, Kind.ARRIVAL, lambda: seen.append((slot.engine.state.over_s, slot.engine.state.decode_spent_s)))
    while events.run(100):
        pass
    before, after = seen
    assert before != (0.0, 0.0), "the first request has decoded"
    assert after == (0.0, 0.0)


@pytest.mark.parametrize(("rate_per_s", "kv_tokens"), [(2.0, 10**6), (4.0, 10**6), (1.0, 3000)])
@pytest.mark.parametrize("time_slices", get_args(TimeSlices))
def test_adapters_share_the_batches_and_the_weights_of_their_base(
    rate_per_s: float, kv_tokens: int, time_slices: TimeSlices
) -> None:
    """Two adapters of m0 and one of m3, which itself is asked for nothing."""
    bases = {"m1": "m0", "m2": "m0", "m4": "m3"}
    models = [
        structs.replace(model, weights_bytes=GIB // 50, base=_base_of(bases[model.name]))
        if model.name in bases
        else model
        for model in MODELS
    ]
    requests = [one for one in traffic(40, rate_per_s, seed=4) if one.model != "m3"]
    numbered = [structs.replace(one, number=number) for number, one in enumerate(requests)]
    settings = settings_of(kv_tokens, 64, "swap", time_slices=time_slices)
    slower = replace(settings, adapter_steps=((1, 1.0), (2, 1.5), (4, 1.75)))
    ends_s = []
    for given in (settings, slower):
        slot, _ = compare(numbered, given, prefilled=False, models=models)
        assert set(slot.engine.models) == {"m0", "m3"}
        ends_s.append(slot.busy_s)
    assert ends_s[0] < ends_s[1]


def _base_of(name: str) -> BaseModel:
    return BaseModel(name=name, path="-", weights_bytes=4 * GIB)


def compare(
    requests: Sequence[Request], settings: ReplaySettings, *, prefilled: bool, models: Sequence[ModelSpec] = MODELS
) -> tuple[SlotProcess, set[bool]]:
    """Serve requests on a slot, and check each token against the live engine step by step; whether tokens were late."""
    events = Events()
    made: dict[int, Served] = {}
    late: set[bool] = set()

    def on_step(slot: SlotProcess, outputs: list, fast_forward: FastForward | None) -> None:  # type: ignore[type-arg]
        for output in outputs:
            if output.token_ids:
                served = made[int(output.request_id)]
                if served.left:
                    served.fast_forward(fast_forward) if fast_forward else served.token(events.now_s)

    answers = answers_by_model(clairvoyant=True)
    slot = SlotProcess(
        0, "both", settings, events, on_step, lambda request_id: made[int(request_id)], answers=answers, renews=True
    )
    slot.load(models)

    def come(request: Request) -> None:
        made[request.number] = Served(request=request, target=TARGET, made=int(prefilled))
        slot.add(engine_request(request, prefilled=prefilled))

    for request in requests:
        events.at(request.arrived_s, Kind.ARRIVAL, lambda request=request: come(request))
    while events.run(100):
        pass
    live = replay(requests, settings, models, prefilled=prefilled)
    assert not any(served.left for served in made.values())
    for number, times_s in live.items():
        served = made[number]
        due_s = requests[number].arrived_s + TARGET.ttft_s + prefilled * TARGET.tbt_s
        lates_s = [out_s - due_s - place * TARGET.tbt_s for place, out_s in enumerate(times_s)]
        assert served.last_s == pytest.approx(times_s[-1], abs=1e-6)
        assert served.late_s == pytest.approx(max(lates_s), abs=1e-6)
        assert sum(late_s < -1e-6 for late_s in lates_s) <= served.in_time <= sum(late_s < 1e-6 for late_s in lates_s)
        if not prefilled:
            assert served.first_s == pytest.approx(times_s[0], abs=1e-6)
        late |= {late_s > 0 for late_s in lates_s}
    return slot, late
