from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.scaling import ScaleStep
from controlplane.policies.slots import PlacedInstance, SlotDecision, SlotFacts, SlotRoom, SlotSettings, choose_slots

A = Endpoint(model="a", region="west")
B = Endpoint(model="b", region="west")
GPUS = {
    ModelGpu(model="a", gpu_type="H"): 1,
    ModelGpu(model="b", gpu_type="H"): 2,
    ModelGpu(model="a", gpu_type="L"): 2,
}


def step(endpoint: Endpoint, delta: int, gpu_type: str | None = "H") -> ScaleStep:
    return ScaleStep(endpoint=endpoint, gpu_type=gpu_type, delta=delta, reason="because")


def slot(
    node_id: str, place: int = 0, free: int = 4, *, gpu_type: str = "H", age_s: float = 0.5, accepting: bool = True
) -> SlotRoom:
    return SlotRoom(
        node_id=node_id,
        slot=place,
        region="west",
        gpu_type=gpu_type,
        gpus=4,
        gpus_free=free,
        age_s=age_s,
        accepting=accepting,
    )


def instance(
    name: str, endpoint: Endpoint = A, node_id: str = "n1", *, draining: bool = False, ready: bool = True, left: int = 0
) -> PlacedInstance:
    return PlacedInstance(
        instance_id=name,
        endpoint=endpoint,
        gpu_type="H",
        node_id=node_id,
        slot=0,
        draining=draining,
        ready=ready,
        remaining_tokens=left,
    )


def decide(
    steps: list[ScaleStep], slots: list[SlotRoom], instances: list[PlacedInstance] | None = None
) -> SlotDecision:
    facts = SlotFacts(steps=tuple(steps), slots=tuple(slots), instances=tuple(instances or []), gpus=GPUS)
    return choose_slots(facts, 0.0, SlotSettings())


def test_instances_spread_over_nodes_with_most_free_gpus_first() -> None:
    decision = decide([step(A, 3)], [slot("n1", free=2), slot("n2", free=4), slot("n3", free=3)])
    assert [add.node_id for add in decision.adds] == ["n2", "n3", "n1"]
    beside = decide([step(A, 1)], [slot("n1", free=4), slot("n2", free=2)], [instance("i", node_id="n1")])
    assert [add.node_id for add in beside.adds] == ["n2"]


def test_scarce_gpus_go_round_the_endpoints() -> None:
    decision = decide([step(A, 3), step(B, 2)], [slot("n1", free=4)])
    assert Counter(add.endpoint for add in decision.adds) == {A: 2, B: 1}  # a, b (2 GPUs), a; then none is left
    assert {(each.endpoint, each.count) for each in decision.unplaced} == {(A, 1), (B, 1)}
    assert decision.unplaced[0].reason == "GPUs full in west: 0 of 4 H free, needs 2 in one slot"


def test_one_instance_never_spans_slots() -> None:
    decision = decide([step(B, 1)], [slot("n1", 0, free=1), slot("n1", 1, free=1)])
    assert decision.adds == ()
    assert decision.unplaced[0].reason == "GPUs full in west: 2 of 8 H free, needs 2 in one slot"


@pytest.mark.parametrize(
    ("slots", "wanted", "reason"),
    [
        ([slot("n1", age_s=6)], step(A, 1), "GPUs full in west: 0 of 4 H free, needs 1 in one slot; 1 nodes silent"),
        ([slot("n1", accepting=False)], step(A, 1), "1 nodes silent or draining"),
        ([slot("n1", gpu_type="L")], step(A, 1), "no H in west"),
        ([slot("n1")], step(A, 1, "Z"), "a has no profile on Z"),
        ([slot("n1")], step(Endpoint(model="a", region="east"), 1, None), "no H or L in east"),
    ],
)
def test_what_finds_no_slot_says_why(slots: list[SlotRoom], wanted: ScaleStep, reason: str) -> None:
    decision = decide([wanted], slots)
    assert decision.adds == ()
    assert [each.count for each in decision.unplaced] == [1]
    assert reason in decision.unplaced[0].reason


def test_any_gpu_type_will_do_where_none_is_named() -> None:
    decision = decide([step(A, 2, None)], [slot("n1", gpu_type="L", free=4), slot("n2", free=1)])
    assert {(add.gpu_type, add.gpus) for add in decision.adds} == {("L", 2), ("H", 1)}


def test_a_draining_instance_is_taken_back_before_one_is_started() -> None:
    draining = [instance("short", draining=True, left=5), instance("long", draining=True, left=50)]
    decision = decide([step(A, 3)], [slot("n1", free=4)], draining)
    assert [each.instance_id for each in decision.revives] == ["long", "short"]
    assert len(decision.adds) == 1
    on_silent_node = decide([step(A, 1)], [slot("n1", age_s=9), slot("n2")], draining)
    assert on_silent_node.revives == ()
    assert [add.node_id for add in on_silent_node.adds] == ["n2"]
    other = decide([step(B, 1)], [slot("n1", free=4)], draining)
    assert other.revives == ()


def test_what_has_least_left_to_do_is_drained() -> None:
    instances = [
        instance("busy", left=900),
        instance("idle", left=3),
        instance("going", draining=True),
        instance("new", ready=False),
        instance("other", endpoint=B),
    ]
    assert [each.instance_id for each in decide([step(A, -2)], [], instances).drains] == ["new", "idle"]
    assert [each.instance_id for each in decide([step(A, -9)], [], instances).drains] == ["new", "idle", "busy"]


@settings(deadline=None)
@given(
    free=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    wants=st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 6)), max_size=2, unique_by=lambda want: want[0]),
    backwards=st.booleans(),
)
def test_no_slot_is_overfull_and_nothing_is_left_undone_with_room(
    free: list[int], wants: list[tuple[Endpoint, int]], *, backwards: bool
) -> None:
    slots = [slot(f"n{place // 2}", place, free=count) for place, count in enumerate(free)]
    steps = [step(endpoint, count) for endpoint, count in wants]
    decision = decide(steps, slots)
    if backwards:
        assert decide(steps[::-1], slots[::-1]) == decision
    taken: Counter[int] = Counter()
    for add in decision.adds:
        taken[add.slot] += add.gpus
    left = [count - taken[place] for place, count in enumerate(free)]
    assert all(room >= 0 for room in left)
    missing = {each.endpoint: each.count for each in decision.unplaced}
    for endpoint, count in wants:
        added = sum(add.endpoint == endpoint for add in decision.adds)
        assert added + missing.get(endpoint, 0) == count
        if endpoint in missing:
            assert max(left) < GPUS[ModelGpu(model=endpoint.model, gpu_type="H")]
