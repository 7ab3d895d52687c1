"""The pools of a scenario's nodes: their models, host memory and requests."""

import pytest
from msgspec import structs

from dataplane.protocol.messages import BaseModel
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.scenario import ScenarioError
from ops.simulator.world.serving import hosted_models
from tests.ops.simulator.fixed import scenario_of
from tests.ops.simulator.replayed import spec_of

GB = 10**9
MODELS = [spec_of(name, weights_bytes=size * GB) for name, size in (("a", 30), ("b", 10), ("c", 10), ("d", 10))]


def test_each_model_is_on_the_node_with_the_fewest_bytes_before_it() -> None:
    assert [[model.name for model in mine] for mine in hosted_models(MODELS, 2, 30 * GB)] == [["a"], ["b", "c", "d"]]
    assert hosted_models(MODELS, 1, None) == [MODELS]


def test_an_adapter_is_where_its_base_is_and_takes_its_own_bytes() -> None:
    a, b, *_ = MODELS
    base = BaseModel(name="b", path="-", weights_bytes=b.weights_bytes)
    adapters = [structs.replace(spec_of(f"b{n}", weights_bytes=GB), base=base) for n in range(3)]
    hosted = hosted_models([adapters[0], a, b, *adapters[1:]], 2, 30 * GB)
    assert [[model.name for model in mine] for mine in hosted] == [["a"], ["b", "b0", "b1", "b2"]]
    with pytest.raises(ScenarioError, match=r"fleet\.host_bytes: must be at least 13000000000 .* of 4 models"):
        hosted_models([b, *adapters], 1, 12 * GB)


def test_weights_that_host_memory_has_no_room_for_are_an_error() -> None:
    with pytest.raises(ScenarioError, match=r"fleet\.host_bytes: must be at least 30000000000 .* of 4 models"):
        hosted_models(MODELS, 2, 30 * GB - 1)
    with pytest.raises(ScenarioError, match=r"fleet\.host_bytes: must be at least 45000000000"):
        build_world(scenario_of("pooled", host_bytes=30 * GB), seed=1)


def test_nodes_are_pools_whose_models_differ_and_all_requests_are_served() -> None:
    outcome = simulate(scenario_of("both", pool_nodes=2, host_bytes=100 * GB))
    assert outcome.result.failures == {}
    reported = [sorted(facts.instance_id for facts in server.reports()) for server in outcome.world.present.servers]
    assert reported == [
        [f"{region}/pool{n}/{name}" for name in names]
        for region in ("east", "west")
        for n, names in ((0, "ac"), (1, "b"))
    ]
    assert outcome.result.event_log_hash != simulate(scenario_of("both")).result.event_log_hash


def test_kv_that_host_memory_has_no_room_for_stays_where_it_was_made() -> None:
    """A prefill slot hands KV over through host memory: with little of it requests wait, and all are served."""
    wide, narrow = (
        simulate(scenario_of("pooled", host_bytes=45 * GB + spare_bytes)) for spare_bytes in (100 * GB, 1_500_000_000)
    )
    assert narrow.result.failures == wide.result.failures == {}
    assert narrow.result.event_log_hash != wide.result.event_log_hash
    assert narrow.result.service_attainment <= wide.result.service_attainment


def test_a_request_whose_kv_is_never_taken_by_host_memory_fails_and_the_simulation_ends() -> None:
    outcome = simulate(scenario_of("pooled", host_bytes=45 * GB + 100_000_000))
    assert outcome.result.failures["longer than an instance's KV memory"] > 0
    assert sum(outcome.result.failures.values()) < outcome.result.requests
