"""Who can be pooled, how much each takes, and why others cannot."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, NodeFacts, NodeSlot, PoolKey
from controlplane.policies.fit import AdapterSize, ModelSize, WeightsMemory
from controlplane.policies.placement.poolable import (
    PoolableFacts,
    PoolableSettings,
    PoolProfile,
    choose_poolable,
)
from controlplane.policies.placement.pools import LATENCY_FIELDS, PoolLoad, occupancy_of

LATENCY = {
    "prefill_base_s": 0.009,
    "prefill_per_token_s": 4.3e-05,
    "prefill_per_token2_s": 8.5e-10,
    "decode_base_s": 0.0128,
    "decode_per_context_token_s": 2.3e-07,
    "decode_per_sequence_s": 1.6e-04,
    "switch_s": 0.5,
}
A, B = (Endpoint(model=model, region="east") for model in "ab")
ON_H800 = EndpointGpu(model="a", region="east", gpu_type="H800")
OTHER = EndpointGpu(model="b", region="east", gpu_type="H800")
ONE_GPU = NodeSlot(gpus=1)
TOGETHER = NodeSlot(gpus=4, workers=4)
NODE = NodeFacts(name="n1", region="east", gpu_type="H800", slots=(ONE_GPU, ONE_GPU), host_bytes=100)


def facts(**changes: Any) -> PoolableFacts:
    values: dict[str, Any] = {
        "profiles": {
            ModelGpu(model=model, gpu_type="H800"): PoolProfile(gpus=1, latency=LATENCY | {"source": 1.0})
            for model in "ab"
        },
        "sizes": {"a": ModelSize(weights_bytes=10), "b": ModelSize(weights_bytes=20)},
        "endpoints": frozenset({A, B}),
        "demand": {A: (30.0, 90.0)},
        "nodes": (NODE,),
    }
    return PoolableFacts(**values | changes)


def test_what_an_endpoint_takes_is_that_of_its_busiest_window() -> None:
    settings = PoolableSettings(fill=0.7, prompt_tokens=300.0, output_tokens=100.0, tbt_s=0.2, round_s=6.0)
    pools = choose_poolable(facts(), settings).facts
    assert pools is not None
    load = PoolLoad(
        **{name: LATENCY[name] for name in LATENCY_FIELDS},
        requests_per_s=0.3,
        input_tokens=300.0,
        output_tokens=100.0,
        tbt_s=0.2,
        round_s=6.0,
    )
    assert pools.occupancy[ON_H800] == pytest.approx(occupancy_of(load).total)
    assert 0 < pools.occupancy[OTHER] < 1e-3, "without demand it takes next to nothing"
    assert (pools.fill, pools.weights_bytes, pools.host_bytes_per_gpu) == (0.7, {"a": 10, "b": 20}, {"H800": 50})


def test_one_slot_must_carry_an_endpoint_alone() -> None:
    """At 40 requests/s a GPU is more than full; two GPUs of a slot take twice as much of twice as many."""
    pools = choose_poolable(facts(demand={A: (40 * 512.0,)}), PoolableSettings()).facts
    assert pools is not None
    assert pools.occupancy.keys() == {OTHER}


def test_a_slot_of_several_workers_carries_more_of_models_that_fit_on_one() -> None:
    """An endpoint takes what its load says, whatever the workers; the smallest slot of its region must carry it."""
    demand = {A: (8 * 512.0,)}
    share = shares((replace(NODE, slots=(TOGETHER,)),), demand)["a"]
    assert 0.8 < share < 0.8 * 4
    assert "a" not in shares((NODE,), demand)
    assert "a" not in shares((NODE, replace(NODE, slots=(TOGETHER,))), demand), "it may be given a slot of one"
    elsewhere = replace(NODE, region="west")
    assert shares((elsewhere, replace(NODE, slots=(TOGETHER,))), demand)["a"] == share
    assert "a" not in shares((replace(NODE, slots=(NodeSlot(gpus=4, workers=2),)),), {}), "not one of its size"


def test_the_placement_is_told_of_slots_that_a_pool_takes_whole() -> None:
    east = replace(NODE, slots=(TOGETHER, TOGETHER))
    pools = choose_poolable(facts(nodes=(east, replace(NODE, region="west"))), PoolableSettings()).facts
    assert pools is not None
    assert pools.slot_gpus == {PoolKey(region="east", gpu_type="H800"): 4}
    mixed = choose_poolable(facts(nodes=(east, NODE)), PoolableSettings()).facts
    assert mixed is not None
    assert mixed.slot_gpus == {}, "there are slots of one"


def shares(nodes: tuple[NodeFacts, ...], demand: dict[Endpoint, tuple[float, ...]]) -> dict[str, float]:
    """What models take, of those that can be pooled."""
    pools = choose_poolable(facts(nodes=nodes, demand=demand), PoolableSettings()).facts
    return {} if pools is None else {key.model: share for key, share in pools.occupancy.items()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": ()}, "no node with H800 serves"),
        ({"nodes": (replace(NODE, slots=()),)}, "no node with H800 serves"),
        ({"nodes": (NODE, replace(NODE, host_bytes=None))}, "some node with H800 does not tell its host memory"),
        (
            {"nodes": (replace(NODE, slots=(NodeSlot(gpus=4), NodeSlot(gpus=2))),)},
            "workers on H800 have 2 or 4 GPUs, the model takes 1",
        ),
    ],
)
def test_why_nobody_can_be_pooled(changes: Any, reason: str) -> None:
    pools = choose_poolable(facts(**changes), PoolableSettings())
    assert pools.facts is None
    assert set(pools.left_out.values()) == {reason}
    assert pools.summary() == f"not poolable: 2 x {reason}"


def test_why_one_model_cannot() -> None:
    unknown = {ModelGpu(model="a", gpu_type="H800"): PoolProfile(gpus=1, latency=None)}
    pools = choose_poolable(facts(profiles=facts().profiles | unknown), PoolableSettings())
    assert pools.facts is not None
    assert {key.model for key in pools.facts.occupancy} == {"b"}
    assert pools.record()["left_out"] == [
        {"model": "a", "gpu_type": "H800", "reason": "no latency in the profile on H800"}
    ]


def test_the_least_host_memory_counts_and_what_is_there_is_passed_on() -> None:
    place = PoolKey(region="east", gpu_type="H800")
    given = facts(nodes=(NODE, replace(NODE, host_bytes=40)), present={place: 1}, pooled=frozenset({ON_H800}))
    pools = choose_poolable(given, PoolableSettings()).facts
    assert pools is not None
    assert (pools.host_bytes_per_gpu, pools.present, pools.pooled) == ({"H800": 20}, {place: 1}, {ON_H800})


def test_endpoints_that_may_have_no_instances_are_not_pooled() -> None:
    pools = choose_poolable(facts(endpoints=frozenset({B})), PoolableSettings()).facts
    assert pools is not None
    assert {key.model for key in pools.occupancy} == {"b"}


def test_they_can_be_disabled() -> None:
    pools = choose_poolable(facts(), PoolableSettings(enabled=False))
    assert (pools.facts, pools.summary()) == (None, "no pools: they are disabled")
    assert pools.record() == {
        "enabled": False,
        "fill": 0.8,
        "prompt_tokens": 512.0,
        "output_tokens": 256.0,
        "tbt_s": 0.1,
        "round_s": 12.0,
        "left_out": [],
    }


def test_weights_must_fit_on_every_slot() -> None:
    small = NodeSlot(gpus=1, weights=WeightsMemory(weights_bytes=60, dtype="float32"))
    sizes = {"a": ModelSize(weights_bytes=30, parameters=15), "b": ModelSize(weights_bytes=32, parameters=16)}
    given_facts = facts(nodes=(replace(NODE, slots=(ONE_GPU, small)),), sizes=sizes)
    pools = choose_poolable(given_facts, PoolableSettings())
    assert pools.left_out == {ModelGpu(model="b", gpu_type="H800"): "the weights do not fit on every slot with H800"}
    assert pools.facts is not None
    assert set(pools.facts.occupancy) == {ON_H800}


def adapter_of(base: str, weights_bytes: int) -> ModelSize:
    return ModelSize(weights_bytes=20, adapter=AdapterSize(base=base, weights_bytes=weights_bytes))


def test_an_adapter_beside_its_base_takes_its_own_bytes_and_no_switch() -> None:
    alone = choose_poolable(facts(demand={A: (90.0,), B: (90.0,)}), PoolableSettings()).facts
    sizes = {"a": adapter_of("b", 2), "b": ModelSize(weights_bytes=20)}
    beside = choose_poolable(facts(demand={A: (90.0,), B: (90.0,)}, sizes=sizes), PoolableSettings()).facts
    assert alone is not None
    assert beside is not None
    assert beside.weights_bytes == {"a": 2, "b": 20}
    assert beside.occupancy[OTHER] == alone.occupancy[OTHER]
    assert beside.occupancy[ON_H800] < alone.occupancy[ON_H800]


def test_the_first_adapter_stands_for_a_base_that_is_not_offered() -> None:
    sizes = {"a": adapter_of("c", 2), "b": adapter_of("c", 3), "c": ModelSize(weights_bytes=20)}
    pools = choose_poolable(facts(demand={A: (90.0,), B: (90.0,)}, sizes=sizes), PoolableSettings()).facts
    assert pools is not None
    assert pools.weights_bytes == {"a": 22, "b": 3, "c": 20}
    assert pools.occupancy[OTHER] < pools.occupancy[ON_H800]
    west = Endpoint(model="b", region="west")
    both = choose_poolable(facts(sizes=sizes, endpoints=frozenset({A, B, west})), PoolableSettings()).facts
    assert both is not None
    assert both.weights_bytes["b"] == 23, "in the west nobody else brings the base"


LARGE = {
    ModelGpu(model="a", gpu_type="H800"): PoolProfile(gpus=1, latency=LATENCY),
    ModelGpu(model="b", gpu_type="H800"): PoolProfile(gpus=4, latency=LATENCY),
}


def test_each_size_of_slots_has_a_pool_of_its_own() -> None:
    """Each model is pooled on slots of its size, and its pool may have no more GPUs than these have."""
    node = replace(NODE, slots=(ONE_GPU, ONE_GPU, NodeSlot(gpus=4)))
    pools = choose_poolable(facts(profiles=LARGE, nodes=(node,)), PoolableSettings())
    assert pools.left_out == {}
    assert pools.facts is not None
    assert {key: pools.facts.pool(key).worker_gpus for key in pools.facts.occupancy} == {ON_H800: 1, OTHER: 4}
    small, large = (PoolKey(region="east", gpu_type="H800", worker_gpus=gpus) for gpus in (1, 4))
    assert pools.facts.most == {small: 2, large: 4}
    elsewhere = replace(NODE, region="west")
    fewer = choose_poolable(
        facts(profiles=LARGE, nodes=(replace(node, slots=(ONE_GPU,)), elsewhere)), PoolableSettings()
    )
    assert fewer.left_out == {OTHER.pair: "workers on H800 have 1 GPUs, the model takes 4"}


def test_plans_that_regroup_may_pool_on_slots_that_are_not_there_yet() -> None:
    nodes = (replace(NODE, slots=(ONE_GPU,) * 6, regroups=True),)
    pools = choose_poolable(facts(profiles=LARGE, nodes=nodes), PoolableSettings()).facts
    assert pools is not None
    assert pools.occupancy.keys() == {ON_H800, OTHER}
    assert pools.most == {PoolKey(region="east", gpu_type="H800", worker_gpus=4): 4}, "six GPUs make one slot of four"


def test_only_slots_of_its_size_must_hold_a_model_s_weights() -> None:
    small, large = (NodeSlot(gpus=gpus, weights=WeightsMemory(weights_bytes=15 * gpus)) for gpus in (1, 4))
    pools = choose_poolable(facts(profiles=LARGE, nodes=(replace(NODE, slots=(small, large)),)), PoolableSettings())
    assert pools.left_out == {}
