from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from controlplane.policies.assignment.choose import choose_slots
from controlplane.policies.assignment.facts import (
    Donation,
    InstanceChange,
    PlacedInstance,
    SlotDecision,
    SlotFacts,
    SlotRoom,
    SlotSettings,
)
from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.fit import AdapterSize, ModelSize, WeightsMemory
from controlplane.policies.scaling.facts import KindStep, ScaleStep
from dataplane.protocol.tiers import InstanceKind

A = Endpoint(model="a", region="west")
B = Endpoint(model="b", region="west")
IW, NIW = InstanceKind.IW, InstanceKind.NIW
GPUS = {
    ModelGpu(model="a", gpu_type="H"): 1,
    ModelGpu(model="b", gpu_type="H"): 2,
    ModelGpu(model="a", gpu_type="L"): 2,
}


def step(endpoint: Endpoint, delta: int, gpu_type: str | None = "H") -> ScaleStep:
    return ScaleStep(endpoint=endpoint, gpu_type=gpu_type, delta=delta, reason="because")


def slot(
    node_id: str,
    place: int = 0,
    free: int = 4,
    *,
    gpu_type: str = "H",
    age_s: float = 0.5,
    accepting: bool = True,
    workers: int = 1,
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
        workers=workers,
    )


def instance(
    name: str, endpoint: Endpoint = A, node_id: str = "n1", *, left: int = 0, **changes: Any
) -> PlacedInstance:
    values: dict[str, Any] = {"gpu_type": "H", "slot": 0, "remaining_tokens": left} | changes
    return PlacedInstance(instance_id=name, endpoint=endpoint, node_id=node_id, **values)


def donated(name: str, endpoint: Endpoint = A, *, age_s: float = 60, lease: str = "", **changes: Any) -> PlacedInstance:
    """A spot instance; `lease` is empty, "leased" or "noticed"."""
    facts = Donation(age_s=age_s, leased=bool(lease), noticed=lease == "noticed")
    return instance(name, endpoint, ready=False, donation=facts, **changes)


def decide(
    steps: list[ScaleStep], slots: list[SlotRoom], instances: list[PlacedInstance] | None = None, **changes: Any
) -> SlotDecision:
    facts = SlotFacts(steps=tuple(steps), slots=tuple(slots), instances=tuple(instances or []), gpus=GPUS)
    return choose_slots(facts, 0.0, SlotSettings(**changes))


def names(changes: Iterable[InstanceChange]) -> list[str]:
    return [change.instance_id for change in changes]


def test_instances_spread_over_nodes_with_most_free_gpus_first() -> None:
    decision = decide([step(A, 3)], [slot("n1", free=2), slot("n2", free=4), slot("n3", free=3)])
    assert [add.node_id for add in decision.adds] == ["n2", "n3", "n1"]
    spread = decide([step(A, 1)], [slot("n1", free=4), slot("n2", free=2)], [instance("i", node_id="n1")])
    assert [add.node_id for add in spread.adds] == ["n2"]


def test_scarce_gpus_go_round_the_endpoints() -> None:
    decision = decide([step(A, 3), step(B, 2)], [slot("n1", free=4)])
    assert Counter(add.endpoint for add in decision.adds) == {A: 2, B: 1}  # a, b (2 GPUs), a; then none is left
    assert {(each.endpoint, each.count) for each in decision.unplaced} == {(A, 1), (B, 1)}
    assert decision.unplaced[0].reason == "GPUs full in west: 0 of 4 H free, needs 2 in one slot"


def test_one_instance_never_spans_slots() -> None:
    decision = decide([step(B, 1)], [slot("n1", 0, free=1), slot("n1", 1, free=1)])
    assert decision.adds == ()
    assert decision.unplaced[0].reason == "GPUs full in west: 2 of 8 H free, needs 2 in one slot"


def test_an_instance_fits_on_one_worker() -> None:
    decision = decide([step(B, 3)], [slot("n1", workers=4), slot("n2", workers=2)])
    assert [add.node_id for add in decision.adds] == ["n2", "n2"], "two GPUs, and those of n1 have workers of their own"
    spare = [donated(f"s{number}", node_id="n1") for number in range(4)]
    full = decide([step(B, 1)], [slot("n1", free=0, workers=4)], spare)
    assert not full.redeploys
    words = "GPUs full in west: 0 of 4 H free, needs 2 in one slot, whose workers have 1 at most"
    assert full.unplaced[0].reason == words


def test_a_slot_of_several_hosts_is_for_models_of_its_size_alone() -> None:
    """`b` takes two GPUs, the slot has four."""
    spanning = structs.replace(slot("n1"), hosts=2)
    whole = structs.replace(spanning, gpus=2, gpus_free=2)
    decision = decide([step(B, 1)], [spanning])
    assert not decision.adds
    words = "b takes 2 GPUs, the slots of H in west are of several hosts: a model takes all 4 of one"
    assert decision.unplaced[0].reason == words
    spare = donated("s", node_id="n1", gpus=4)
    assert not decide([step(B, 1)], [structs.replace(spanning, gpus_free=0)], [spare]).redeploys
    assert [add.gpus for add in decide([step(B, 1)], [whole]).adds] == [2]
    adapter = {"b": ModelSize(weights_bytes=1, adapter=AdapterSize(base="a", weights_bytes=1))}
    facts = SlotFacts(steps=(step(B, 1),), slots=(whole,), instances=(), gpus=GPUS, sizes=adapter)
    refused = choose_slots(facts, 0.0, SlotSettings())
    assert not refused.adds
    assert "b is a LoRA adapter, the slots of H in west are of several hosts" in refused.unplaced[0].reason


def test_slots_of_several_hosts_are_the_reason_only_where_there_are_no_others() -> None:
    """`a` takes one GPU on H, and two on L."""
    spanning = structs.replace(slot("n1"), hosts=2)
    (full,) = decide([step(A, 1, None)], [spanning, slot("n2", free=0, gpu_type="L")]).unplaced
    assert full.reason == "GPUs full in west: 0 of 4 H or L free, needs 2 in one slot"
    whole = structs.replace(slot("n2", gpu_type="L"), gpus=2, gpus_free=0, hosts=2)
    (full,) = decide([step(A, 1, None)], [spanning, whole]).unplaced
    assert full.reason == "GPUs full in west: 0 of 2 H or L free, needs 2 in one slot"
    (refused,) = decide([step(A, 1, None)], [spanning, structs.replace(whole, gpus=4)]).unplaced
    words = "a takes {} GPUs, the slots of {} in west are of several hosts: a model takes all 4 of one"
    assert refused.reason == f"{words.format(1, 'H')}; {words.format(2, 'L')}"


def test_slots_that_serve_together_are_left_to_pools_as_long_as_there_are_others() -> None:
    """They come after single ones of any node, and then one is filled after the other, but for the spread."""
    slots = [slot("n1", workers=4), slot("n2", workers=4), slot("n3", free=1)]
    many = [Endpoint(model="a", region="west"), Endpoint(model="b", region="west"), Endpoint(model="c", region="west")]
    gpus = {ModelGpu(model=each.model, gpu_type="H"): 1 for each in many}
    facts = SlotFacts(steps=tuple(step(each, 1) for each in many), slots=tuple(slots), instances=(), gpus=gpus)
    adds = choose_slots(facts, 0.0, SlotSettings()).adds
    assert [add.node_id for add in adds] == ["n3", "n1", "n1"], "n2 is whole"
    assert {add.node_id for add in decide([step(A, 3)], slots).adds} == {"n1", "n2", "n3"}


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
    assert names(decide([step(A, -2)], [], instances).drains) == ["new", "idle"]
    assert names(decide([step(A, -9)], [], instances).drains) == ["new", "idle", "busy"]
    stuck = [*instances, instance("stuck", ready=False, stuck=True)]
    assert names(decide([step(A, -1)], [], stuck).drains) == ["stuck"]


def test_what_leaves_its_node_is_drained_before_its_successor_unless_nothing_else_serves() -> None:
    """Else a successor would end in place of what ends anyway; but what starts does not serve."""
    going, starting = instance("going", left=3, leaving="drain"), instance("new", ready=False)
    ready = instance("ready", left=900)
    assert names(decide([step(A, -1)], [], [going, ready, starting]).drains) == ["going"]
    assert names(decide([step(A, -1)], [], [going, starting]).drains) == ["new"]
    other = instance("other", left=9, leaving="drain")
    assert names(decide([step(A, -1)], [], [going, other, starting]).drains) == ["going"]
    assert names(decide([step(A, -2)], [], [going, other, starting]).drains) == ["going", "new"]


def test_what_is_let_go_is_lent_out_if_it_is_worth_keeping() -> None:
    instances = [instance("ready"), instance("new", ready=False)]
    decision = decide([step(A, -2)], [slot("n1")], instances)
    assert (names(decision.donates), names(decision.drains)) == (["ready"], ["new"])
    for slots, changes in (
        ([slot("n1")], {"donation_enabled": False}),
        ([slot("n1", accepting=False)], {}),
        ([slot("n1", age_s=9)], {}),
    ):
        stopped = decide([step(A, -2)], slots, instances, **changes)
        assert (names(stopped.donates), names(stopped.drains)) == ([], ["new", "ready"])


def placed(decision: SlotDecision) -> dict[str, Any]:
    """What a decision does to start instances."""
    shown: dict[str, Callable[[Any], Any]] = {
        "redeploys": lambda adds: [add.replaces for add in adds],
        "adds": len,
        "unplaced": lambda missing: [each.endpoint for each in missing],
    }
    return {
        name: shown[name](found) if name in shown else names(found)
        for name in ("revives", "reclaims", "redeploys", "adds", "notices", "unplaced")
        if (found := getattr(decision, name))
    }


def test_the_order_of_scale_out() -> None:
    """Each round the best source is used up: draining, spot of the model, spot of others, free GPUs, leased ones."""
    room = slot("n1", free=1)
    everything = [
        instance("drains", draining=True),
        donated("mine"),
        donated("lent", lease="leased"),
        donated("other", B),
        donated("lent other", B, lease="leased"),
    ]
    expected: list[dict[str, Any]] = [
        {"revives": ["drains"]},
        {"reclaims": ["mine"]},
        {"redeploys": [("other",)]},
        {"adds": 1},
        {"notices": ["lent"]},
        {"notices": ["lent other"]},
    ]
    left, used_up = everything, iter(["drains", "mine", "other", "", "lent", "lent other"])
    for found in expected:
        assert placed(decide([step(A, 1)], [room], left)) == found
        gone = next(used_up)
        left = [each for each in left if each.instance_id != gone]
        room = slot("n1", free=0) if "adds" in found else room
    whole = decide([step(A, 8)], [slot("n1", free=1)], everything)
    assert names(whole.revives) == ["drains"]
    assert names(whole.reclaims) == ["mine"]
    assert names(whole.notices) == ["lent", "lent other"]
    assert (len(whole.redeploys), len(whole.adds)) == (1, 1)
    assert [each.count for each in whole.unplaced] == [2]


def test_notice_is_given_once_and_to_as_many_as_are_missing() -> None:
    """A lease that has notice stands for one missing instance until it ends."""
    leased = [donated("a", lease="leased"), donated("b", lease="noticed"), donated("c", lease="leased")]
    assert placed(decide([step(A, 1)], [slot("n1", free=0)], leased)) == {}
    assert placed(decide([step(A, 2)], [slot("n1", free=0)], leased)) == {"notices": ["a"]}
    others = [donated("a", B, lease="leased", gpus=2), donated("b", B, lease="noticed", gpus=2)]
    assert placed(decide([step(A, 1)], [slot("n1", free=0)], others)) == {}
    assert placed(decide([step(A, 2)], [slot("n1", free=0)], others)) == {}, "both will have room where one is now"
    assert placed(decide([step(A, 3)], [slot("n1", free=0)], others)) == {"notices": ["a"]}


def test_nobody_loses_a_lease_while_gpus_are_free() -> None:
    leased = [donated("lent", lease="leased")]
    assert placed(decide([step(A, 1)], [slot("n1", free=0), slot("n2")], leased)) == {"adds": 1}
    noticed_one = [donated("told", lease="noticed")]
    assert placed(decide([step(A, 1)], [slot("n1", free=0), slot("n2")], noticed_one)) == {}, "it is about to come back"


def test_free_gpus_beside_a_lease_are_kept_for_who_waits_for_both() -> None:
    """b needs two GPUs: a free one, and one that is leased. The second a must not take the free one meanwhile."""
    other = Endpoint(model="c", region="west")
    held = [instance("drains", draining=True), donated("lent", other, lease="leased")]
    decision = decide([step(A, 2), step(B, 1)], [slot("n1", free=1)], held)
    assert placed(decision) == {"revives": ["drains"], "notices": ["lent"], "unplaced": [A]}


def test_redeploying_stops_as_few_as_possible_and_the_longest_lent_first() -> None:
    small = [donated("new", A, age_s=5), donated("old", A, age_s=50), donated("older", A, age_s=70)]
    decision = decide([step(B, 1)], [slot("n1", free=0)], small)
    assert [(add.gpus, add.replaces) for add in decision.redeploys] == [(2, ("older", "old"))]
    with_free = decide([step(B, 1)], [slot("n1", free=1)], small)
    assert [add.replaces for add in with_free.redeploys] == [("older",)]
    assert with_free.stops == (), "what is replaced is not stopped a second time"
    assert decide([step(B, 1)], [slot("n1", free=0)], small[:1]).redeploys == ()


def test_spot_on_nodes_that_cannot_be_relied_on_is_not_taken_back() -> None:
    for room in (slot("n1", age_s=9), slot("n1", accepting=False)):
        decision = decide([step(A, 1)], [room, slot("n2")], [donated("mine")])
        assert (decision.reclaims, [add.node_id for add in decision.adds]) == ((), ["n2"])
    failed = decide([step(A, 1)], [slot("n1")], [donated("mine", stuck=True)])
    assert (names(failed.reclaims), len(failed.adds), names(failed.stops)) == ([], 1, ["mine"])


@pytest.mark.parametrize(
    ("room", "changes", "reason"),
    [
        (slot("n1"), {"donation_enabled": False}, "donations are disabled"),
        (slot("n1", accepting=False), {}, "slot 0 of node n1 is being drained"),
    ],
)
def test_spot_ends_where_it_may_not_be(room: SlotRoom, changes: dict[str, Any], reason: str) -> None:
    held = [donated("free"), donated("lent", lease="leased"), donated("told", lease="noticed")]
    decision = decide([], [room], held, **changes)
    assert [(each.instance_id, each.reason) for each in decision.stops] == [("free", reason)]
    assert [(each.instance_id, each.reason) for each in decision.notices] == [("lent", reason)]


def test_old_spot_that_nobody_leases_is_stopped() -> None:
    held = [donated("young", age_s=60), donated("old", age_s=61), donated("lent", age_s=99, lease="leased")]
    assert names(decide([], [slot("n1")], held, donation_max_age_s=60).stops) == ["old"]
    assert decide([], [slot("n1")], held).stops == ()


def test_a_new_instance_avoids_the_node_where_others_do_not_come_up() -> None:
    stuck = instance("stuck", node_id="n1", ready=False, stuck=True)
    fine = [instance("one", node_id="n2"), instance("two", node_id="n2")]
    decision = decide([step(A, 1)], [slot("n1", free=4), slot("n2", free=1)], [stuck, *fine])
    assert [add.node_id for add in decision.adds] == ["n2"]


def test_kinds_are_changed_and_let_go_by_kind() -> None:
    of_kind = [instance("i1", kind=IW), instance("i2", kind=IW, ready=False), instance("n1", kind=NIW)]
    facts = SlotFacts(
        steps=(ScaleStep(endpoint=A, gpu_type=None, delta=-1, reason="because", kind=NIW),),
        kinds=(KindStep(endpoint=A, before=IW, after=NIW, count=1),),
        slots=(slot("n1"),),
        instances=tuple(of_kind),
        gpus=GPUS,
    )
    decision = choose_slots(facts, 0.0, SlotSettings())
    assert [(each.instance_id, each.kind) for each in decision.changed_kinds] == [("i1", NIW)]
    assert names(decision.donates) in (["i1"], ["n1"])
    add = choose_slots(replace(facts, steps=(replace(facts.steps[0], delta=1),), kinds=()), 0.0, SlotSettings()).adds
    assert [each.kind for each in add] == [NIW]


any_spot = st.builds(
    lambda endpoint, lease, place, age_s: (endpoint, lease, place, age_s),
    st.sampled_from([A, B]),
    st.sampled_from(["", "leased", "noticed"]),
    st.integers(0, 2),
    st.integers(0, 9),
)


@given(
    free=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    held=st.lists(any_spot, max_size=6),
    wants=st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 5)), max_size=2, unique_by=lambda want: want[0]),
)
def test_gpus_of_spot_instances_are_never_given_twice(
    free: list[int], held: list[tuple[Endpoint, str, int, int]], wants: list[tuple[Endpoint, int]]
) -> None:
    slots = [slot(f"n{place}", place, free=count) for place, count in enumerate(free)]
    instances = {
        f"s{number}": donated(
            f"s{number}", endpoint, lease=lease, age_s=age_s, node_id=f"n{place}", slot=place, gpus=_gpus(endpoint)
        )
        for number, (endpoint, lease, place, age_s) in enumerate(held)
    }
    decision = decide([step(endpoint, count) for endpoint, count in wants], slots, list(instances.values()))
    stopped = [name for add in decision.redeploys for name in add.replaces]
    touched = [*stopped, *names(decision.reclaims), *names(decision.notices), *names(decision.stops)]
    assert len(touched) == len(set(touched)), "each instance has one fate"
    assert not any(instances[name].leased for name in [*stopped, *names(decision.reclaims)])
    room = dict(enumerate(free))
    for name in stopped:
        room[instances[name].slot] += instances[name].gpus
    for add in (*decision.adds, *decision.redeploys):
        room[add.slot] -= add.gpus
    assert min(room.values()) >= 0
    for endpoint, count in wants:
        mine = [i for i in decision.reclaims if instances[i.instance_id].endpoint == endpoint]
        begun = sum(add.endpoint == endpoint for add in (*decision.adds, *decision.redeploys))
        assert len(mine) + begun <= count, "never more than was asked for"


def _gpus(endpoint: Endpoint) -> int:
    return GPUS[ModelGpu(model=endpoint.model, gpu_type="H")]


@given(
    free=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 4])), min_size=1, max_size=5),
    wants=st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 6)), max_size=2, unique_by=lambda want: want[0]),
    backwards=st.booleans(),
)
def test_no_slot_is_overfull_and_nothing_is_left_undone_with_room(
    free: list[tuple[int, int]], wants: list[tuple[Endpoint, int]], *, backwards: bool
) -> None:
    slots = [slot(f"n{at // 2}", at, free=count, workers=workers) for at, (count, workers) in enumerate(free)]
    steps = [step(endpoint, count) for endpoint, count in wants]
    decision = decide(steps, slots)
    if backwards:
        assert decide(steps[::-1], slots[::-1]) == decision
    taken: Counter[int] = Counter()
    for add in decision.adds:
        taken[add.slot] += add.gpus
    left = [count - taken[place] for place, (count, _) in enumerate(free)]
    assert all(room >= 0 for room in left)
    assert all(add.gpus <= slots[add.slot].worker_gpus for add in decision.adds)
    missing = {each.endpoint: each.count for each in decision.unplaced}
    for endpoint, count in wants:
        added = sum(add.endpoint == endpoint for add in decision.adds)
        assert added + missing.get(endpoint, 0) == count
        if endpoint in missing:
            takes = [min(room, each.worker_gpus) for room, each in zip(left, slots, strict=True)]
            assert max(takes) < _gpus(endpoint)


def test_weights_that_do_not_fit_go_where_they_do_or_are_said() -> None:
    """The emptiest slots are too small for them in the type that their node computes in."""
    mib, sizes = 2**20, {"a": ModelSize(weights_bytes=257 * 2**20, parameters=257 * 2**19)}
    small = structs.replace(slot("n1"), weights=WeightsMemory(weights_bytes=256 * mib, dtype="float32"))
    large = structs.replace(slot("n2", free=1), weights=WeightsMemory(weights_bytes=600 * mib, dtype="float32"))
    spare = donated("s", B, gpus=4)
    for others in ((), (spare,)):
        rooms = (structs.replace(small, gpus_free=0) if others else small, large)
        facts = SlotFacts(steps=(step(A, 2),), slots=rooms, instances=others, gpus=GPUS, sizes=sizes)
        decision = choose_slots(facts, 0.0, SlotSettings())
        assert [add.node_id for add in decision.adds] == ["n2"]
        assert not decision.redeploys
        assert decision.unplaced[0].reason.startswith("GPUs full in west: 0 of 4 H free")
    nowhere = SlotFacts(steps=(step(A, 1),), slots=(small,), instances=(), gpus=GPUS, sizes=sizes)
    [unplaced] = choose_slots(nowhere, 0.0, SlotSettings()).unplaced
    assert unplaced.reason.startswith("the weights of a fit on no slot in west: 514 MiB in float32")
