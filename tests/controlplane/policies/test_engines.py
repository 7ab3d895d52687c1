"""Which engine runs an instance, and who moves: the operator's word, what was measured, what the node prefers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.engines import EngineFacts, choose_engine, choose_engine_changes
from controlplane.policies.facts import Endpoint

TIDE = Endpoint(model="tide", region="us-east")
VLLM_FASTER = {"torch": 9000.0, "vllm": 15_000.0}
TORCH_FASTER = {"torch": 415.0, "vllm": 124.0}


def instance(name: str = "i1", **changes: Any) -> EngineFacts:
    """A steady one with a slot of its own, on a node that prefers torch."""
    facts = EngineFacts(
        instance_id=name,
        endpoint=TIDE,
        engine="torch",
        asked="auto",
        node_prefers="torch",
        pooled=False,
        whole_slot=True,
        ready=True,
        steady=True,
        rates={},
    )
    return replace(facts, **changes)


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
        ({"node_prefers": "replay", "asked": "vllm"}, "auto", "replays"),
    ],
)
def test_who_decides(changes: dict[str, Any], engine: str, reason: str) -> None:
    decision = choose_engine(instance(**changes))
    assert decision.engine == engine
    assert reason in decision.reason


def changed(*facts: EngineFacts) -> list[tuple[str, str, bool]]:
    return [(each.instance_id, each.decision.engine, each.moves) for each in choose_engine_changes(facts)]


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


_FACTS = st.builds(
    EngineFacts,
    instance_id=st.just("i"),
    endpoint=st.sampled_from([TIDE, Endpoint(model="ebb", region="us-east")]),
    engine=st.sampled_from(["auto", "torch", "vllm"]),
    asked=st.sampled_from(["auto", "torch", "vllm"]),
    node_prefers=st.sampled_from(["torch", "vllm", "replay"]),
    pooled=st.booleans(),
    whole_slot=st.booleans(),
    ready=st.booleans(),
    steady=st.just(True),
    rates=st.sampled_from([{}, VLLM_FASTER, TORCH_FASTER]),
)


@given(st.lists(_FACTS, max_size=6))
def test_it_settles_with_at_most_one_of_an_endpoint_away(drawn: list[EngineFacts]) -> None:
    fleet = {str(place): replace(facts, instance_id=str(place)) for place, facts in enumerate(drawn)}
    fleet = {name: replace(facts, steady=facts.ready) for name, facts in fleet.items()}
    for _ in range(len(fleet) + 1):
        changes = choose_engine_changes(list(fleet.values()))
        moving = [fleet[change.instance_id].endpoint for change in changes if change.moves]
        assert len(set(moving)) == len(moving)
        for change in changes:
            fleet[change.instance_id] = replace(fleet[change.instance_id], engine=change.decision.engine)
        fleet = {name: replace(facts, ready=True, steady=True) for name, facts in fleet.items()}
    assert all(facts.engine == choose_engine(facts).engine for facts in fleet.values())
