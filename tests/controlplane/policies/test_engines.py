"""Which engine runs an instance, and who moves: the operator's word, what was measured, what the node prefers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.engines import (
    Engine,
    EngineChange,
    EngineDecision,
    EngineFacts,
    EngineFailure,
    EngineSettings,
    choose_engine,
    choose_engine_changes,
    is_engines_fault,
)
from controlplane.policies.facts import Endpoint

TIDE = Endpoint(model="tide", region="us-east")
VLLM_FASTER = {"torch": 9000.0, "vllm": 15_000.0}
TORCH_FASTER = {"torch": 415.0, "vllm": 124.0}
NOW_S = 1_000_000.0
SETTINGS = EngineSettings(retry_s=600.0, retry_max_s=4000.0)


def instance(name: str = "i1", **changes: Any) -> EngineFacts:
    """A steady one with a slot of its own, on a node that prefers torch."""
    facts = EngineFacts(
        instance_id=name,
        endpoint=TIDE,
        engine="torch",
        came_from=None,
        asked="auto",
        node_prefers="torch",
        slot=("n1", 0),
        pooled=False,
        gpus=1,
        whole_slot=True,
        workers=1,
        ready=True,
        steady=True,
        rates={},
        failures={},
    )
    return replace(facts, **changes)


def decide(facts: EngineFacts, *, later_s: float = 0.0) -> EngineDecision:
    return choose_engine(facts, NOW_S + later_s, SETTINGS)


def failed(engine: Engine, times: int = 1) -> dict[Engine, EngineFailure]:
    """Just now."""
    return {engine: EngineFailure(times=times, failed_s=NOW_S, error="n1: no such kernel")}


@pytest.mark.parametrize(
    ("changes", "engine", "reason"),
    [
        ({}, "torch", "not measured on both engines"),
        ({"node_prefers": "vllm"}, "vllm", "not measured on both engines"),
        ({"node_prefers": "vllm", "rates": {"torch": 9000.0}}, "vllm", "not measured on both engines"),
        ({"node_prefers": "vllm", "rates": TORCH_FASTER}, "torch", "measured: torch 415, vLLM 124 tokens/s"),
        ({"node_prefers": "vllm", "rates": VLLM_FASTER}, "vllm", "measured: torch 9000, vLLM 15000 tokens/s"),
        ({"rates": VLLM_FASTER}, "torch", "its node keeps to the torch engine"),
        ({"asked": "vllm", "rates": TORCH_FASTER}, "vllm", "chosen for the model"),
        ({"asked": "torch", "node_prefers": "vllm"}, "torch", "chosen for the model"),
        ({"node_prefers": "vllm", "whole_slot": False}, "torch", "it shares its slot"),
        ({"node_prefers": "vllm", "asked": "vllm", "pooled": True}, "torch", "pooled"),
        ({"asked": "vllm", "gpus": 2}, "vllm", "chosen for the model"),
        ({"node_prefers": "vllm", "gpus": 2}, "vllm", "not measured on both engines"),
        ({"asked": "vllm", "gpus": 2, "whole_slot": False}, "torch", "it takes 2 GPUs of a larger slot"),
        ({"asked": "vllm", "whole_slot": False, "workers": 8}, "torch", "8 workers of its slot serve together"),
        ({"node_prefers": "replay", "asked": "vllm"}, "auto", "replays"),
    ],
)
def test_who_decides(changes: dict[str, Any], engine: str, reason: str) -> None:
    decision = decide(instance(**changes))
    assert decision.engine == engine
    assert reason in decision.reason


def changes_of(*instances: EngineFacts) -> tuple[EngineChange, ...]:
    return choose_engine_changes([(facts, decide(facts)) for facts in instances])


def changed(*instances: EngineFacts) -> list[tuple[str, str, bool]]:
    return [(each.instance_id, each.decision.engine, each.moves) for each in changes_of(*instances)]


def test_those_of_an_endpoint_move_one_after_the_other() -> None:
    fleet = [instance(name, asked="vllm") for name in ("a", "b", "c")]
    assert changed(*fleet) == [("a", "vllm", True)]
    fleet[0] = replace(fleet[0], engine="vllm", steady=False)
    assert changed(*fleet) == [], "it may not have left yet"
    fleet[0] = replace(fleet[0], ready=False)
    assert changed(*fleet) == [], "nor come up: the others stay where they are"
    fleet[0] = replace(fleet[0], ready=True, steady=True)
    assert changed(*fleet) == [("b", "vllm", True)]


def test_endpoints_do_not_wait_for_each_other() -> None:
    west = Endpoint(model="tide", region="us-west")
    fleet = [instance("a", steady=False), *(instance(name, endpoint=west, asked="vllm") for name in ("b", "c"))]
    assert changed(*fleet) == [("b", "vllm", True)]


def test_what_serves_nobody_or_stays_where_it_is_need_not_wait() -> None:
    new = instance("new", engine="auto", ready=False, steady=False, asked="vllm")
    old = instance("old", engine="auto", node_prefers="vllm")
    pooled = instance("pooled", engine="auto", node_prefers="vllm", pooled=True)
    assert changed(new, old, pooled) == [("new", "vllm", False), ("old", "vllm", False), ("pooled", "torch", False)]


def test_an_engine_that_failed_is_left_alone_longer_each_time() -> None:
    for times, alone_s in [(1, 600), (2, 1200), (3, 2400), (4, 4000), (9, 4000)]:
        facts = instance(asked="vllm", failures=failed("vllm", times))
        kept = decide(facts, later_s=alone_s - 1)
        assert kept.engine == "torch"
        assert f"chosen for the model, but vllm failed {times} x here, the last time on n1: no such" in kept.reason
        assert "tried again after 1970-01-12 " in kept.reason
        assert decide(facts, later_s=alone_s) == EngineDecision(engine="vllm", reason="chosen for the model")


def test_who_failed_on_its_engine_goes_back_to_the_one_it_had() -> None:
    away = {"ready": False, "steady": False}
    to_vllm = instance("a", engine="vllm", came_from="torch", asked="vllm", failures=failed("vllm"), **away)
    waiting = instance("b", asked="vllm", failures=failed("vllm"))
    assert changed(to_vllm, waiting) == [("a", "torch", False)], "and the others stay where they are"
    to_torch = instance("a", engine="torch", came_from="vllm", asked="torch", failures=failed("torch"), **away)
    assert changed(to_torch) == [("a", "vllm", False)]
    new = instance("new", engine="torch", asked="torch", failures=failed("torch"), **away)
    assert changed(new) == [], "it never ran on vLLM, which its node may not have"
    neither = replace(to_vllm, failures=failed("vllm") | failed("torch"))
    assert changed(neither) == []
    assert "vllm failed 1 x here" in decide(neither).reason
    serving = instance("a", engine="vllm", asked="vllm", failures=failed("vllm"))
    assert changed(serving) == [], "on another node it failed, not here"


def test_whose_fault_a_failure_is() -> None:
    assert is_engines_fault("vllm", None)
    assert is_engines_fault("vllm", "torch")
    assert is_engines_fault("torch", "vllm")
    assert not is_engines_fault("torch", None), "on torch every checkpoint should run: it is the checkpoint"
    assert not is_engines_fault("torch", "torch")
    assert not is_engines_fault("auto", "vllm")


_FACTS = st.builds(
    EngineFacts,
    instance_id=st.just("i"),
    endpoint=st.sampled_from([TIDE, Endpoint(model="ebb", region="us-east")]),
    engine=st.sampled_from(["auto", "torch", "vllm"]),
    came_from=st.sampled_from([None, "torch", "vllm"]),
    asked=st.sampled_from(["auto", "torch", "vllm"]),
    node_prefers=st.sampled_from(["torch", "vllm", "replay"]),
    slot=st.just(("n1", 0)),
    pooled=st.booleans(),
    gpus=st.sampled_from([1, 2]),
    whole_slot=st.booleans(),
    ready=st.booleans(),
    steady=st.just(True),
    rates=st.sampled_from([{}, VLLM_FASTER, TORCH_FASTER]),
    failures=st.sampled_from([{}, failed("vllm"), failed("torch"), failed("vllm") | failed("torch")]),
)


@given(st.lists(_FACTS, max_size=6))
def test_it_settles_with_at_most_one_of_an_endpoint_away(drawn: list[EngineFacts]) -> None:
    """Each is on a slot of its own."""
    alone = [replace(facts, instance_id=str(place), slot=("n1", place)) for place, facts in enumerate(drawn)]
    fleet = {facts.instance_id: facts for facts in alone}
    fleet = {name: replace(facts, steady=facts.ready) for name, facts in fleet.items()}
    for _ in range(len(fleet) + 1):
        changes = changes_of(*fleet.values())
        moving = [fleet[change.instance_id].endpoint for change in changes if change.moves]
        assert len(set(moving)) == len(moving)
        for change in changes:
            fleet[change.instance_id] = replace(fleet[change.instance_id], engine=change.decision.engine)
        fleet = {name: replace(facts, ready=True, steady=True) for name, facts in fleet.items()}
    assert all(facts.engine == decide(facts).engine for facts in fleet.values())


@pytest.mark.parametrize(("workers", "engine"), [(1, "vllm"), (2, "torch")])
def test_a_pooled_family_runs_on_vllm_where_one_worker_has_its_slot(workers: int, engine: str) -> None:
    pooled = instance(pooled=True, asked="vllm", gpus=0, whole_slot=False, workers=workers)
    assert decide(pooled).engine == "torch"
    assert decide(replace(pooled, family=True)).engine == engine
    assert decide(replace(pooled, family=True, node_prefers="replay")).engine == "auto"


def test_a_pooled_slot_moves_as_a_whole_or_not_at_all() -> None:
    """Its agent runs one engine on a slot, and refuses instances that want another."""

    def family(node: str, *models: str) -> list[EngineFacts]:
        pooled = instance(pooled=True, family=True, asked="vllm", gpus=0, whole_slot=False, slot=(node, 0))
        at = {model: Endpoint(model=model, region="us-east") for model in models}
        return [replace(pooled, instance_id=f"{node}-{model}", endpoint=at[model]) for model in models]

    def moved(*instances: EngineFacts) -> set[str]:
        return {name for name, _, moves in changed(*instances) if moves}

    here, there = family("n1", "base", "one", "two"), family("n2", "two", "one", "base")
    assert moved(*here) == {"n1-base", "n1-one", "n1-two"}
    crossed = [here[0], there[0], there[1], here[1], there[2], here[2]]
    assert moved(*crossed) == {"n1-base", "n1-one", "n1-two"}, "the other slot follows when this one serves"
    assert moved(*here[:2], replace(here[2], steady=False)) == set(), "one has just come up"
    assert moved(*here[:2], replace(here[2], failures=failed("vllm"))) == set(), "one stays on torch"
    never = replace(here[2], ready=False, steady=False, failures=failed("vllm"))
    assert moved(*here[:2], never) == {"n1-base", "n1-one"}, "who serves on no engine keeps nobody"
