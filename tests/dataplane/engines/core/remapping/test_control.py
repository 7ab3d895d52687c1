"""Whose layers go and come back: by hand, and what holds for any slot."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.engines.core.remapping.caps import ModelFacts, choose_cap, circle_of
from dataplane.engines.core.remapping.circle import is_hidden
from dataplane.engines.core.remapping.control import RemapDecision, RemapFacts, RemapState, choose_remap
from dataplane.engines.core.remapping.settings import RemapSettings

LATER_S = 1e6
SETTINGS = RemapSettings(margin=0.0, share_max=1.0)


def model(name: str, *, active: bool = False, cap: int = 4, **changes: object) -> ModelFacts:
    """Ten layers of 100 bytes. `cap`: how many may be offloaded; m T_T = 10 T_c, one frame (5 divides 10) or two."""
    facts = {
        "model": name,
        "layers": 10,
        "layer_bytes": 100,
        "load_s": 1.0,
        "compute_s": {0: 0.5, 1: 3.0, 2: 4.0, 3: 5.0, 4: 6.0, 8: 20.0}[cap],
        "active": active,
    }
    return ModelFacts(**(facts | changes))  # type: ignore[arg-type]


def offloaded(facts: RemapFacts, decision: RemapDecision) -> dict[str, int]:
    """Of each model, after the decision."""
    return {
        model.model: decision.rotations[model.model].offloaded if model.model in decision.rotations else model.offloaded
        for model in facts.models
    }


def applied(facts: RemapFacts, decision: RemapDecision) -> tuple[ModelFacts, ...]:
    after = offloaded(facts, decision)
    return tuple(replace(model, offloaded=after[model.model]) for model in facts.models)


def offloaded_bytes(models: tuple[ModelFacts, ...]) -> int:
    return sum(model.offloaded * model.layer_bytes for model in models)


def choose(
    *models: ModelFacts, short: int = 0, free: int = 0, settings: RemapSettings = SETTINGS, at_s: float = LATER_S
) -> tuple[dict[str, int], RemapDecision]:
    facts = RemapFacts(models=models, short_bytes=short, free_bytes=free)
    decision, _ = choose_remap(facts, RemapState(pressed_s=0.0), at_s, settings)
    return offloaded(facts, decision), decision


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 4, 8])
def test_the_caps_of_these_tests(cap: int) -> None:
    assert choose_cap(model("a", cap=cap), SETTINGS).layers == cap


@pytest.mark.parametrize(
    ("short", "expected", "missing"),
    [
        (1, {"A": 0, "B": 0, "C": 1}, 0),
        (100, {"A": 0, "B": 0, "C": 1}, 0),
        (400, {"A": 0, "B": 0, "C": 4}, 0),  # C, of the lowest priority, to its cap,
        (600, {"A": 0, "B": 2, "C": 4}, 0),  # then B,
        (900, {"A": 1, "B": 4, "C": 4}, 0),  # and the active one last, as in the paper's figure 7
        (1000, {"A": 2, "B": 4, "C": 4}, 0),
        (1150, {"A": 2, "B": 4, "C": 4}, 150),
    ],
)
def test_inactive_models_of_low_priority_go_first(short: int, expected: Mapping[str, int], missing: int) -> None:
    models = model("A", active=True, cap=2, priority=0), model("B", priority=2), model("C", priority=1)
    after, decision = choose(*models, short=short)
    assert after == expected
    assert decision.missing_bytes == missing
    assert decision.capped == ({"A": "not hidden", "B": "not hidden", "C": "not hidden"} if missing else {})


@pytest.mark.parametrize(
    ("victims", "expected"), [("mru", {"a": 0, "b": 3, "c": 0}), ("lru", {"a": 3, "b": 0, "c": 0})]
)
def test_without_priorities_the_last_or_the_first_used_goes_first(victims: str, expected: Mapping[str, int]) -> None:
    settings = replace(SETTINGS, victims=victims)  # type: ignore[arg-type]
    models = model("a", used_s=1.0), model("b", used_s=3.0), model("c", used_s=2.0)
    assert choose(*models, short=300, settings=settings)[0] == expected


def test_active_models_go_round_robin() -> None:
    models = model("a", active=True), model("b", active=True, offloaded=1), model("c", active=True)
    assert choose(*models, short=400)[0] == {"a": 2, "b": 2, "c": 1}


def test_layers_whose_loads_cannot_be_hidden_are_not_offloaded_and_the_reason_is_reported() -> None:
    after, decision = choose(model("a", cap=0, active=True), model("b", compute_s=None), short=50)
    assert after == {"a": 0, "b": 0}
    assert decision.missing_bytes == 50
    assert decision.capped == {"a": "not hidden", "b": "unmeasured"}


def test_a_layer_of_a_model_that_became_active_goes_to_one_that_is_not() -> None:
    models = model("a", active=True, offloaded=3, cap=2), model("b", offloaded=2), model("c", cap=8)
    after, _ = choose(*models)
    assert after == {"a": 0, "b": 4, "c": 1}


def test_a_move_that_kv_has_not_followed_yet_is_not_made_again() -> None:
    """Three layers of the inactive model are offloaded and free; KV is still in those of the active one."""
    models = model("a", active=True, offloaded=3, cap=4), model("b", offloaded=3, cap=8)
    assert choose(*models, free=300, at_s=0.0)[0] == {"a": 0, "b": 3}
    assert choose(*models, free=100, at_s=0.0)[0] == {"a": 0, "b": 5}
    assert choose(*models, free=300, at_s=0.0, settings=replace(SETTINGS, reverts=False))[0] == {"a": 0, "b": 6}


def test_a_move_gives_as_many_bytes_as_it_takes() -> None:
    """Two layers of 60 bytes for one of 100; the 20 left over and 20 of the next do not make another."""
    after, _ = choose(model("a", active=True, offloaded=2), model("b", cap=3, layer_bytes=60))
    assert after == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (199, {"a": 1, "b": 2, "c": 3}),  # a layer and one to spare are 200
        (200, {"a": 1, "b": 2, "c": 2}),
        (400, {"a": 1, "b": 1, "c": 1}),
        (600, {"a": 1, "b": 0, "c": 0}),
        (2000, {"a": 0, "b": 0, "c": 0}),
    ],
)
def test_layers_come_back_in_the_reverse_order(free: int, expected: Mapping[str, int]) -> None:
    models = model("a", offloaded=1, cap=1), model("b", active=True, offloaded=2), model("c", active=True, offloaded=3)
    assert choose(*models, free=free)[0] == expected
    assert choose(*models, free=free, settings=replace(SETTINGS, reverts=False))[0] == {"a": 1, "b": 2, "c": 3}
    assert choose(*models, free=free, at_s=0.9)[0] == {"a": 1, "b": 2, "c": 3}  # an allocation failed at 0


def test_what_steps_no_longer_hide_comes_back_at_once() -> None:
    """As off-peak, when a step of few requests is short. Layers that cannot be reclaimed are reported."""
    over = model("a", active=True, offloaded=4, cap=2)
    after, decision = choose(over, free=100, at_s=0.0)
    assert after == {"a": 3}
    assert decision.over == ("a",)
    assert choose(over, free=200, at_s=0.0)[1].over == ()
    assert choose(over, free=200, settings=replace(SETTINGS, reverts=False))[0] == {"a": 4}


MODELS = st.lists(
    st.builds(
        lambda **facts: facts,
        layers=st.integers(2, 12),
        layer_bytes=st.sampled_from([60, 100, 100, 250]),
        load_s=st.floats(0.1, 2.0),
        compute_s=st.none() | st.floats(0.5, 60.0),
        active=st.booleans(),
        offloaded=st.integers(0, 11),
        priority=st.integers(0, 2),
        used_s=st.floats(0.0, 9.0),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda many: tuple(
        ModelFacts(model="abcd"[i], **(facts | {"offloaded": min(facts["offloaded"], facts["layers"] - 1)}))
        for i, facts in enumerate(many)
    )
)
CHOICES = st.builds(
    RemapSettings,
    margin=st.sampled_from([0.0, 0.2]),
    share_max=st.sampled_from([0.3, 0.9, 1.0]),
    frames_max=st.integers(1, 3),
    victims=st.sampled_from(["mru", "lru"]),
    capped=st.booleans(),
)


@examples(max_examples=50)
@given(models=MODELS, short=st.integers(0, 3000), free=st.integers(0, 3000), settings=CHOICES)
def test_bytes_add_up_and_nothing_is_offloaded_beyond_its_cap(
    models: tuple[ModelFacts, ...], short: int, free: int, settings: RemapSettings
) -> None:
    facts = RemapFacts(models=models, short_bytes=short, free_bytes=0 if short else free)
    decision, _ = choose_remap(facts, RemapState(), LATER_S, settings)
    assert choose_remap(facts, RemapState(), LATER_S, settings)[0] == decision
    after = applied(facts, decision)
    gained = offloaded_bytes(after) - offloaded_bytes(models)
    assert gained + facts.free_bytes >= short - decision.missing_bytes
    for before, model in zip(models, after, strict=True):
        cap = choose_cap(model, settings).layers
        assert 0 <= model.offloaded < model.layers
        assert model.offloaded <= max(cap, before.offloaded)
        assert (model.model in decision.over) == (model.offloaded > cap)
        rotation = decision.rotations.get(model.model)
        circle = circle_of(model, settings)
        if rotation and circle and settings.capped and model.offloaded <= cap:
            assert is_hidden(circle, rotation)
    if decision.missing_bytes:
        assert all(model.offloaded >= choose_cap(model, settings).layers for model in after)


@examples(max_examples=50)
@given(models=MODELS, short=st.integers(0, 2000), more=st.integers(0, 1000), settings=CHOICES)
def test_more_pressure_never_brings_a_layer_back(
    models: tuple[ModelFacts, ...], short: int, more: int, settings: RemapSettings
) -> None:
    """For models of one layer size; with others, a move may fit for the one and not for the other."""
    models = tuple(replace(model, layer_bytes=100) for model in models)
    states = []
    for short_bytes, free_bytes in ((0, short + more), (0, short), (short + 1, 0), (short + more + 1, 0)):
        facts = RemapFacts(models=models, short_bytes=short_bytes, free_bytes=free_bytes)
        states.append(offloaded(facts, choose_remap(facts, RemapState(), LATER_S, settings)[0]))
    for calm, pressed in pairwise(states):
        assert all(calm[name] <= pressed[name] for name in calm)


@examples(max_examples=50)
@given(
    models=MODELS,
    demands=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    level=st.integers(0, 3000),
    settings=CHOICES,
)
def test_demand_that_swings_within_the_spare_does_not_flap(
    models: tuple[ModelFacts, ...], demands: list[int], level: int, settings: RemapSettings
) -> None:
    """Demand goes round a few values that differ by less than the smallest layer, long apart: soon nothing changes."""
    own_bytes = 500
    changes = []
    for _ in range(8):
        for demand in (level + swing for swing in demands):
            capacity = own_bytes + offloaded_bytes(models)
            short, free = max(demand - capacity, 0), max(capacity - demand, 0)
            facts = RemapFacts(models=models, short_bytes=short, free_bytes=free)
            decision, _ = choose_remap(facts, RemapState(), LATER_S, settings)
            changes.append(bool(decision.rotations))
            models = applied(facts, decision)
    assert not any(changes[-len(demands) :])


def test_nothing_comes_back_while_pressure_is_recent() -> None:
    pressed = RemapFacts(models=(model("a"),), short_bytes=50)
    decision, state = choose_remap(pressed, RemapState(), 7.0, SETTINGS)
    calm = RemapFacts(models=applied(pressed, decision), free_bytes=1000)
    assert choose_remap(calm, state, 7.9, SETTINGS) == (RemapDecision(), state)
    assert choose_remap(calm, state, 8.0, SETTINGS)[0].rotations["a"].offloaded == 0
