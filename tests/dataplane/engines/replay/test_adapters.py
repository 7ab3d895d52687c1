"""LoRA adapters on a replayed slot: models of their own that share turn and weights of their base, and no prefix."""

from dataclasses import replace

import pytest
from msgspec import structs

from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import BaseModel, ModelSpec
from tests.dataplane.engines.replay.replayed import SETTINGS, drain, engine_with, request, spec, tokens


def adapter(name: str, *, weights_bytes: int = 4, base: str = "a") -> ModelSpec:
    own = structs.replace(spec(name), weights_bytes=weights_bytes)
    return structs.replace(own, base=BaseModel(name=base, path="-", weights_bytes=500))


def test_adapters_of_a_base_share_its_turn_and_answer_each_in_its_own_way() -> None:
    engine, time = engine_with(base=spec(), x=adapter("x"), y=adapter("y"))
    for instance_id in ("base", "x", "y"):
        engine.add(request(instance_id, instance_id))
    outputs = drain(engine)
    assert len({tuple(tokens(one)) for one in outputs.values()}) == 3
    assert engine.stats().switches_total == 1
    assert time.now_s < 102, "one switch of a second, not three"
    assert set(engine.stats().resident_models) == {"a"}


def test_a_base_is_loaded_for_its_adapter_alone_and_goes_with_it() -> None:
    engine, time = engine_with(x=adapter("x"))
    engine.add(request("r", "x", prompt=10, max_tokens=1))
    drain(engine)
    assert time.now_s == pytest.approx(101.02), "a switch of 500 bytes, and a prefill"
    engine.unload("x")
    assert not engine.models


def test_prefixes_are_not_shared_with_the_base() -> None:
    engine, _ = engine_with(replace(SETTINGS, prefix_cache=True), base=spec(), x=adapter("x"))
    cached = {}
    for number, instance_id in enumerate(("base", "x", "base", "x")):
        engine.add(request(f"r{number}", instance_id, prompt=40, max_tokens=2))
        cached[number] = sum(output.cached_tokens for output in drain(engine)[f"r{number}"])
    assert cached == {0: 0, 1: 0, 2: 32, 3: 32}
    assert engine.stats().prefix_query_tokens == {"a": 80, "x": 80}


def test_steps_take_longer_by_the_number_of_adapters_in_them() -> None:
    table = replace(SETTINGS, adapter_steps=((2, 1.5), (4, 2.0)))
    assert [table.adapters_factor(count) for count in range(6)] == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    assert SETTINGS.adapters_factor(3) == 1.0
    took = {}
    for settings in (SETTINGS, table):
        engine, time = engine_with(settings, base=spec(), x=adapter("x"), y=adapter("y"))
        for instance_id in ("x", "y"):
            engine.add(request(instance_id, instance_id))
        drain(engine)
        took[settings is table] = time.now_s - 101  # the clock began at 100, and a switch takes a second
    assert took[True] == pytest.approx(1.5 * took[False]), "both are prefilled and decode together"


def test_adapters_have_memory_of_their_own() -> None:
    engine, _ = engine_with(replace(SETTINGS, adapters_bytes=10), x=adapter("x", weights_bytes=6))
    with pytest.raises(ModelLoadError, match="weights_bytes of y is 6; 4 are left of adapters_bytes=10"):
        engine.load("y", adapter("y", weights_bytes=6))
    engine.load("again", adapter("x", weights_bytes=6))
    engine.unload("x")
    engine.unload("again")
    engine.load("y", adapter("y", weights_bytes=6))
    with pytest.raises(ModelLoadError, match="weights_bytes of z is 9999; it must be 1 to 1000 here"):
        engine.load("b", structs.replace(adapter("z"), base=BaseModel(name="b", path="-", weights_bytes=9999)))
