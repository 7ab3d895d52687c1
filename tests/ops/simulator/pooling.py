"""A small full fleet whose plans are set by hand: who is pooled, who has instances of his own."""

from collections.abc import Collection, Mapping
from typing import Any

from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey
from controlplane.policies.snapshot import PlanPools
from ops.simulator.kernel.events import Kind
from ops.simulator.run import build_world
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.planning import Plan, Planner
from tests.ops.simulator.scaled import PROFILE, changed_scenario

MODELS = ("a", "b", "c")
GIB = 2**30


def pooled(**changes: Any) -> Scenario:
    """Three models on three nodes of a slot each. `changes`: tables, or keys of tables."""
    document: dict[str, Any] = {
        "name": "pooled",
        "regions": ["east"],
        "traffic": {
            "kind": "generated",
            "rate_per_s": 1.0,
            "duration_s": 600.0,
            "origins": {"east": 1},
            "tiers": {"IW-F": 2, "IW-N": 1, "NIW": 1},
            "prompt_tokens": {"median": 400, "most": 2000},
            "output_tokens": {"median": 150, "most": 300},
        },
        "targets": {"NIW": {"ttft_s": 300.0, "tbt_s": 1.0}},
        "models": [
            {"name": name, "weights_bytes": 13 * GIB, "kv_bytes_per_token": 800_000, "tokens_per_s": 3000.0}
            for name in MODELS
        ],
        "fleet": {
            "serving": "dedicated",
            "profile": str(PROFILE),
            "kv_bytes": 10 * GIB,
            "weights_bytes": 30 * GIB,
            "instances": [{"model": "a", "region": "east"}],
            "nodes": [{"region": "east", "count": 3, "slots": 1, "host_bytes": 500 * GIB}],
        },
        "scaling": {"strategy": "lt-i", "instances_min": 0, "instances_max": 3, "every_s": 5, "cooldown_s": 5},
        "planning": {"forecasters": ["last hour's maximum"], "pools": True},
        "provisioning": {"spot_same_s": 4, "spot_same_spread": 0, "spot_other_s": 20, "local_s": 20, "remote_s": 60},
    }
    return changed_scenario(document, changes)


class Operated:
    """A world at its beginning, whose plans are set by hand."""

    def __init__(self, scenario: Scenario, seed: int = 1) -> None:
        self.world, fleet, _ = build_world(scenario, seed)
        assert fleet is not None
        self.fleet: Fleet = fleet
        planner = self.world.recorder.planned.__self__  # type: ignore[attr-defined]
        assert isinstance(planner, Planner)
        self.planner = planner
        planner.make = lambda now_s, fleet: None  # type: ignore[method-assign]

    def plan(self, at_s: float, own: Mapping[str, int], pooled: Collection[str] = (), *, gpus: int = 1) -> None:
        """A plan that comes into force: instances of their own, and pooled endpoints on so many GPUs."""
        pool = PoolKey(region="east", gpu_type="H800")
        pools = PlanPools(
            gpus={pool: gpus} if pooled else {},
            occupancy={EndpointGpu(model=model, region="east", gpu_type="H800"): 0.2 for model in pooled},
        )
        plan = Plan(
            window_start_s=at_s // 3600 * 3600,
            counts={Endpoint(model=model, region="east"): {"H800": count} for model, count in own.items()},
            pools=pools,
            expected={},
            forecasts={},
        )
        self.world.events.at(at_s, Kind.TICK, lambda: setattr(self.planner, "plan", plan))

    def at(self, at_s: float) -> set[str]:
        """The fleet after all events until then: `model@node`, `+` before a pooled one, its state unless it serves."""
        self.world.events.run_before(at_s, Kind.TICK)
        return {
            f"{'+' if one.pooled else ''}{one.endpoint.model}@{one.node.name}"
            f"{'' if one.state == 'serving' else ' ' + one.state}"
            for one in self.fleet.hosted.values()
        }
