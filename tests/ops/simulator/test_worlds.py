"""Whole worlds: each request ends once, the same seed gives the same log, and the policies are the live service's."""

import ast
import importlib
import inspect
import pkgutil
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import controlplane.policies
import dataplane.scheduling
import ops.simulator
from controlplane.planner import expected as live_expected
from controlplane.planner import forecast as live_forecast
from controlplane.planner import plan as live_plan
from controlplane.planner import scale as live_scale
from controlplane.planner import snapshot as live_snapshot
from controlplane.policies.decisions import Admit, Refuse
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import PolicyPart
from ops.simulator.world import loops as sim_loops
from ops.simulator.world import planning as sim_planning
from ops.simulator.world import routing as routing_module
from ops.simulator.world import world as world_module
from tests.ops.simulator.fixed import scenario_of
from tests.ops.simulator.pooling import pooled
from tests.ops.simulator.scaled import scaled

SMALL = Path(__file__).parents[3] / "ops" / "scenarios" / "simulate-small.toml"


SERVINGS = ["dedicated", "pooled", "request-level", "split"]


@settings(max_examples=12)
@given(serving=st.sampled_from(SERVINGS), seed=st.integers(0, 1000), rate_per_s=st.sampled_from([1.0, 6.0]))
def test_each_request_ends_once_and_none_before_it_came(serving: str, seed: int, rate_per_s: float) -> None:
    scenario = scenario_of(serving, rate_per_s=rate_per_s)
    world = simulate(scenario, seed=seed).world
    expected = Counter((request.model, request.tier) for request in traffic_of(scenario, seed))
    assert {key: tally.requests for key, tally in world.tallies.items()} == expected
    assert world.in_flight == 0
    assert sum(tally.failed for tally in world.tallies.values()) == sum(world.failures.values()) == 0
    slots_s = sum(server.slots for server in world.present.servers) * world.events.now_s
    assert 0 < sum(server.busy_s for server in world.present.servers) <= slots_s * (1 + 1e-9)
    service_s = sum(tally.service.sum_s for tally in world.tallies.values())
    network_s = 0.05 * sum(expected.values())
    assert service_s - network_s <= world.request_seconds <= service_s + 1e-6  # Little's law, but for the way back
    for tally in world.tallies.values():
        assert tally.ttft.max_s <= tally.service.max_s
        assert 0 <= tally.service_attainment <= 1
        assert 0 <= tally.token_attainment <= 1


@pytest.mark.parametrize("serving", SERVINGS)
def test_the_same_seed_gives_the_same_log_and_another_seed_another(serving: str) -> None:
    scenario = scenario_of(serving, seconds=10.0)
    one, same, other = (simulate(scenario, seed=seed) for seed in (1, 1, 2))
    assert one.world.log.noted > 0
    assert one.world.log.digest == same.world.log.digest
    assert one.world.log.digest != other.world.log.digest
    volatile = {"seconds", "requests_per_s"}
    assert one.result.model_dump(exclude=volatile) == same.result.model_dump(exclude=volatile)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1000),
    rate_per_s=st.sampled_from([2.0, 10.0]),
    kv_tokens=st.sampled_from([2500, 10_000]),
    batching=st.sampled_from(["turns", "prefill-first"]),
    mixed=st.booleans(),
    rerouting=st.booleans(),
)
def test_instances_that_lag_behind_give_the_log_of_those_that_keep_up(
    seed: int, rate_per_s: float, kv_tokens: int, batching: str, *, mixed: bool, rerouting: bool
) -> None:
    """Whether an instance is advanced when it is read, or by an event wherever something ends there."""
    scenario = scenario_of("dedicated", rate_per_s=rate_per_s, kv_bytes=200_000 * kv_tokens)
    policy = scenario.policy.model_copy(update={"batching": batching, "mixed_batches": mixed, "rerouting": rerouting})
    lagging, prompt = (build_world(scenario.model_copy(update={"policy": policy}), seed)[0] for _ in range(2))
    prompt.events.keep_up()
    for world in (lagging, prompt):
        assert list(world.run())
    assert prompt.events.count > lagging.events.count
    assert prompt.log.digest == lagging.log.digest


def test_what_fits_nowhere_fails_and_is_counted() -> None:
    scenario = scenario_of("dedicated", kv_bytes=200_000 * 400)
    outcome = simulate(scenario)
    failed = sum(row.failed for row in outcome.result.rows)
    assert outcome.result.failures == {"longer than an instance's KV memory": failed}
    assert 0 < failed < outcome.result.requests


@pytest.mark.parametrize("serving", ["dedicated", "pooled", "both"])
def test_servers_report_the_most_tokens_that_fit(serving: str) -> None:
    world, *_ = build_world(scenario_of(serving), 1)
    request = next(iter(traffic_of(scenario_of(serving), 1)))
    for server in world.present.servers:
        for report in server.reports():
            assert report.context_tokens is not None
            for more in (0, 1):
                output = report.context_tokens - 100 + more
                asked = replace(request, model=report.endpoint.model, prompt_tokens=100, output_tokens=output)
                assert server.fits(asked) == (not more)


def modules_of(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(info.name) for info in found]


def defined(module: ModuleType) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def test_what_decides_in_the_loops_is_the_live_loops_own() -> None:
    """Each function of the policies that a live loop calls under this name is the very one the simulator calls."""
    pairs = [
        (live_scale, sim_loops, ("choose_scale", "FleetSnapshot")),
        (live_snapshot, sim_planning, ("FleetSnapshot", "forecast_at")),
        (live_expected, sim_planning, ("demand_to_plan",)),
        (live_plan, sim_planning, ("choose_hour",)),
        (live_forecast, sim_planning, ("forecast_peak",)),
    ]
    for live, simulated, names in pairs:
        for name in names:
            assert getattr(live, name) is getattr(simulated, name), name


def test_no_policy_is_written_twice() -> None:
    policies: dict[str, list[Any]] = {}
    for module in modules_of(controlplane.policies) + modules_of(dataplane.scheduling):
        for name in defined(module):
            policies.setdefault(name, []).append(getattr(module, name))
    used = set()
    for module in modules_of(ops.simulator):
        assert not defined(module) & {name for name in policies if name.startswith(("choose_", "plan_", "order_"))}
        for name, value in vars(module).items():
            if name.startswith("choose_") and name in policies:
                assert any(value is policy for policy in policies[name]), f"{module.__name__}.{name}"
                used.add(name)
    routing = {"choose_route", "choose_preference", "choose_releases", "choose_windows", "choose_admission"}
    routing |= {"choose_reroutes"}
    assert used >= routing | {"choose_turn", "choose_group"} | {
        "choose_scale",
        "choose_slots",
        "choose_hour",
    }


@pytest.mark.parametrize(
    ("serving", "where"),
    [
        ("dedicated", "ops.simulator.world.routing.choose_route"),
        ("dedicated", "ops.simulator.traffic.deferred.choose_releases"),
        ("dedicated", "ops.simulator.world.rerouting.may_reroute"),
        ("dedicated", "ops.simulator.servers.dedicated.settle_shares"),
        ("dedicated", "ops.simulator.servers.prompts.choose_group"),
        ("dedicated", "ops.simulator.servers.dedicated.choose_prefill_tokens"),
        ("scaled", "ops.simulator.world.world.choose_admission"),
        ("scaled", "ops.simulator.world.loops.choose_scale"),
        ("scaled", "ops.simulator.world.loops.choose_slots"),
        ("scaled", "controlplane.policies.hour.choose_placement"),
        ("scaled", "ops.simulator.world.planning.choose_hour"),
        ("scaled", "ops.simulator.world.planning.demand_to_plan"),
        ("scaled", "ops.simulator.world.planning.forecast_at"),
        ("scaled", "ops.simulator.world.planning.forecast_peak"),
        ("pooling", "controlplane.policies.hour.choose_poolable"),
        ("pooled", "ops.simulator.world.routing.choose_route"),
        ("pooled", "dataplane.engines.core.slot_engine.choose_turn"),
        ("pooled", "dataplane.scheduling.schedule.choose_slice"),
        ("both", "dataplane.scheduling.schedule.prompts_aside"),
        ("both", "dataplane.engines.core.step_batches.choose_prefill_tokens"),
        ("pooled", "dataplane.dispatch.dispatcher.choose_prefill_slot"),
    ],
)
def test_the_policies_decide(serving: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def ask(*_: object, **__: object) -> None:
        raise AskedError

    monkeypatch.setattr(where, ask)
    busy = {"seconds": 10.0, "rate_per_s": 20.0}
    if serving == "scaled":
        scenario = scaled(policy={"admission": True})
    elif serving == "pooling":
        scenario = pooled(planning={"learn_s": 300})
    else:
        scenario = scenario_of(serving, **busy)
    if where.endswith("choose_prefill_tokens"):
        scenario = scenario.model_copy(update={"policy": PolicyPart(mixed_batches=True)})
    if where.endswith("may_reroute"):
        scenario = scenario.model_copy(update={"policy": PolicyPart(rerouting=True)})
    if where.endswith(("choose_slice", "prompts_aside")):
        scenario = scenario.model_copy(update={"policy": PolicyPart(time_slices="deadlines")})
    with pytest.raises(AskedError):
        simulate(scenario)


@pytest.mark.parametrize(("tries_max", "served"), [(1, False), (2, False), (3, True)])
def test_who_is_refused_tries_again(tries_max: int, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is let in for 14 s, and everybody is told to wait for seven."""

    def late(facts: Any, now_s: float, settings: Any) -> Admit | Refuse:
        return Refuse(reason="", retry_after_s=7) if now_s < 14 else Admit()

    monkeypatch.setattr(world_module, "choose_admission", late)
    scenario = scenario_of("dedicated", seconds=5.0)
    outcome = simulate(scenario.model_copy(update={"policy": PolicyPart(admission=True, tries_max=tries_max)}))
    assert outcome.world.in_flight == 0
    for (_, tier), tally in outcome.world.tallies.items():
        if tier != "NIW":
            assert (tally.ended, tally.failed)[not served] == tally.requests > 0
            assert not served or tally.ttft.max_s > 14


def test_a_view_counts_what_was_sent_since(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int]] = []
    real = routing_module.choose_route

    def watch(facts: Any, now_s: float, settings: Any) -> Any:
        if facts.model == "a":
            seen.append((now_s, sum(one.sent_tokens for one in facts.instances)))
        return real(facts, now_s, settings)

    monkeypatch.setattr(routing_module, "choose_route", watch)
    simulate(scenario_of("dedicated", rate_per_s=10.0))
    assert any(sent for _, sent in seen)
    in_one_view = [sent for now_s, sent in seen if 3.0 < now_s < 4.0]
    assert len(in_one_view) > 1
    assert in_one_view == sorted(in_one_view)
