"""What of a running fleet becomes a scenario: GPU types that serve something, and what is said of the others."""

from typing import Any

import pytest

from controlplane.settings import Settings
from ops.simulator.kernel.scenario_values import Part
from ops.simulator.run import simulate
from ops.simulator.scenario.live import LiveDemand, LiveError, LiveFleet, LiveScenario, live_scenario
from ops.simulator.scenario.live_settings import SETTINGS
from ops.simulator.scenario.planning import PlanningPart, ProvisioningPart, ScalingPart
from ops.simulator.scenario.scenario import PROFILES as SHIPPED
from ops.simulator.scenario.scenario import Scenario

DEMAND = LiveDemand(rows=[(0, "r", "m", 1.0, ""), (0, "r", "n", 1.0, "")], learn_s=0, simulated_s=3600)
PROFILES = {"A": "a.toml", "B": "b.toml", "C": "c.toml"}


POOLING = {"enabled": True, "fill": 0.7, "prompt_tokens": 300.0, "output_tokens": 200.0, "tbt_s": 0.2, "round_s": 6.0}


def node(
    gpu_type: str,
    *gpus: int,
    workers: int = 1,
    alive: bool = True,
    host_bytes: int | None = None,
    regroups: bool = False,
    layout_held: bool = False,
) -> dict[str, Any]:
    slots = [{"gpus": count, "workers": workers, "memory_bytes": count * 10**11} for count in gpus]
    told = {"alive": alive, "draining": False, "host_bytes": host_bytes}
    told |= {"regroups": regroups, "layout_held": layout_held}
    return {"region": "r", "gpu_type": gpu_type, "slots": slots, **told}


def profile(model: str, gpu_type: str, tokens_per_s: float, gpus: int = 1) -> dict[str, Any]:
    return {"model": model, "gpu_type": gpu_type, "tokens_per_s": tokens_per_s, "gpus": gpus, "load_time_s": 60.0}


def scenario(*nodes: dict[str, Any], **changes: Any) -> LiveScenario:
    """Two models, of which B serves one only."""
    sizes = {"weights_bytes": 10**10, "kv_bytes_per_token": 1, "context_tokens": 9}
    given: dict[str, Any] = {
        "gpu_types": sorted({one["gpu_type"] for one in nodes}),
        "taken_at": "now",
        "regions": [{"name": "r", "position": 0}],
        "latencies": [],
        "nodes": nodes,
        "instances": [
            {"model": "m", "region": "r", "gpu_type": gpu_type, "desired": "running", "pooled": pooled}
            for gpu_type, pooled in (("A", False), ("B", False), ("B", True))
        ],
        "models": [{"name": "m", **sizes}, {"name": "n", **sizes, "weights_bytes": 2 * 10**10}],
        "profiles": [profile("m", "A", 5.0, gpus=2), profile("m", "B", 3.0), profile("n", "A", 4.0)],
        "endpoints": [{"model": "m", "instances_min": 1, "instances_max": 3}],
        "prices": {"A": 2.0, "B": 1.0, "C": 9.0},
        "kv_bytes": {"A": [7, 9, 8]},
    }
    return live_scenario(LiveFleet(**(given | changes)), DEMAND, demand_file="d.csv", profiles=PROFILES)


def test_each_type_has_its_own_rates_prices_and_memory() -> None:
    made = scenario(node("A", 2, 2), node("B", 1))
    fleet, models = made.document["fleet"], {one["name"]: one for one in made.document["models"]}
    assert (fleet["profile"], fleet["kv_bytes"], fleet["cost_per_hour"]) == ("a.toml", 8, {"A": 2.0, "B": 1.0})
    assert fleet["nodes"] == [
        {"region": "r", "count": 1, "slots": 2, "gpus": 2},
        {"region": "r", "count": 1, "slots": 1, "gpus": 1, "profile": "b.toml", "kv_bytes": 8 * 10**10},
    ]
    assert [(one["gpu_type"], one["count"]) for one in fleet["instances"]] == [("A", 1), ("B", 1)]
    assert (models["m"]["tokens_per_s"], models["m"]["gpus"]) == ({"A": 5.0, "B": 3.0}, {"A": 2, "B": 1})
    assert (models["n"]["tokens_per_s"], models["n"]["gpus"]) == ({"A": 4.0}, {"A": 1})
    assert "No instance on B reported its KV memory" in made.text()
    assert "No instance on A" not in made.text()
    assert "1 pooled instances are left out" in made.text()
    assert "pools" not in made.document["planning"]


def test_workers_that_serve_together_are_slots_of_their_own() -> None:
    made = scenario(node("A", 8, workers=4), node("B", 4, workers=4))
    sizes = [(one["slots"], one["gpus"]) for one in made.document["fleet"]["nodes"]]
    assert sizes == [(4, 2), (4, 1)]
    assert "Workers that serve together are taken as slots of their own." in made.text()
    assert "Workers" not in scenario(node("A", 2), node("B", 1)).text()


def test_a_type_that_is_silent_or_serves_nothing_is_left_out() -> None:
    made = scenario(node("A", 2), node("B", 1, alive=False), node("C", 1))
    fleet, [m, _] = made.document["fleet"], made.document["models"]
    assert fleet["nodes"] == [{"region": "r", "count": 1, "slots": 1, "gpus": 2}]
    assert fleet["instances"] == [{"model": "m", "region": "r", "count": 1}]
    assert (m["tokens_per_s"], m["gpus"]) == (5.0, 2)
    assert "Nodes of other GPU types are left out: B, C." in made.text()


def test_what_serves_nothing_is_refused() -> None:
    with pytest.raises(LiveError, match="no model with demand has a profile on C"):
        scenario(node("C", 1))
    with pytest.raises(LiveError, match="no node of A or B is alive"):
        scenario(node("A", 1, alive=False), node("B", 1, alive=False), node("C", 1))
    with pytest.raises(LiveError, match="no instance of them runs on GPUs of its own of type A"):
        scenario(node("A", 1), instances=[])


def test_plans_pool_as_the_plan_in_force_did() -> None:
    """With the memory of each node's host, and for weights what KV leaves of 9/10 of a GPU."""
    made = scenario(node("A", 1, host_bytes=7), node("B", 1, host_bytes=5), pooling=POOLING)
    assert made.document["planning"] == {
        "learn_s": 0,
        "pools": True,
        **{f"pool_{name}": value for name, value in POOLING.items() if name != "enabled"},
    }
    fleet = made.document["fleet"]
    assert (fleet["kv_bytes"], fleet["weights_bytes"]) == (8, 9 * 10**10 - 8)
    assert [(one["host_bytes"], one.get("weights_bytes")) for one in fleet["nodes"]] == [(7, None), (5, 10**10)]
    assert "1 pooled instances are not there at the beginning" in made.text()
    alone = [{"model": "m", "region": "r", "gpu_type": "A", "desired": "running", "pooled": True}]
    made = scenario(node("A", 1, host_bytes=7), pooling=POOLING, instances=alone)
    assert made.document["fleet"]["instances"] == [], "a fleet may be pooled as a whole"


def test_a_reserve_is_taken_over_with_and_without_pools() -> None:
    reserve = {"reserve": {"quantile": 0.8, "correlation": 0.1}}
    for enabled in (True, False):
        made = scenario(node("A", 1, host_bytes=7), pooling=POOLING | reserve | {"enabled": enabled})
        planning = made.document["planning"]
        assert planning["pools"] is enabled
        assert planning["reserve"] is True
        assert (planning["reserve_quantile"], planning["reserve_correlation"]) == (0.8, 0.1)


@pytest.mark.parametrize("pooling", [POOLING, POOLING | {"enabled": False}, None])
def test_without_host_memory_or_a_plan_that_pools_there_are_none(pooling: dict[str, Any] | None) -> None:
    host_bytes = None if pooling == POOLING else 7
    made = scenario(node("A", 1, host_bytes=7), node("B", 1, host_bytes=host_bytes), pooling=pooling)
    assert made.document["planning"] == {"learn_s": 0}
    assert "weights_bytes" not in made.document["fleet"]
    assert "1 pooled instances are left out" in made.text()


def test_adapters_come_with_their_bases() -> None:
    sizes = {"kv_bytes_per_token": 1, "context_tokens": 9}
    models = [
        {"name": "base", "weights_bytes": 10**10, "base": None, **sizes},
        {"name": "m", "weights_bytes": 10**8, "base": "base", **sizes},
        {"name": "n", "weights_bytes": 10**8, "base": "unprofiled", **sizes},
        {"name": "unprofiled", "weights_bytes": 10**10, "base": None, **sizes},
    ]
    profiles = [profile(name, "A", 5.0) for name in ("base", "m", "n")]
    made = scenario(node("A", 2), models=models, profiles=profiles)
    assert [(one["name"], one.get("base")) for one in made.document["models"]] == [("base", None), ("m", "base")]
    assert made.document["fleet"]["adapters_bytes"] == 10**8
    assert "left out: n, unprofiled" in made.text()
    with pytest.raises(LiveError, match="no base of an adapter with demand has a profile on A"):
        scenario(node("A", 2), models=models, profiles=[profile("n", "A", 5.0)])


def test_an_adapter_that_takes_other_gpus_than_its_base_is_a_whole_model() -> None:
    """A scenario refuses it as an adapter: its base may have two GPUs on vLLM, and itself one on torch."""
    sizes = {"kv_bytes_per_token": 1, "context_tokens": 9}
    models = [
        {"name": "m", "weights_bytes": 10**10, "base": None, **sizes},
        {"name": "n", "weights_bytes": 10**8, "base": "m", **sizes},
    ]
    profiles = [profile("m", "A", 5.0, gpus=2), profile("n", "A", 4.0)]
    made = scenario(node("A", 2, 1), models=models, profiles=profiles)
    _, adapter = made.document["models"]
    assert (adapter.get("base"), adapter["weights_bytes"], adapter["gpus"]) == (None, 10**10 + 10**8, 1)
    assert "adapters_bytes" not in made.document["fleet"]
    assert "Adapters that take other GPUs than their bases are whole models here: n." in made.text()


def running(model: str, count: int, gpu_type: str = "A", **changes: Any) -> list[dict[str, Any]]:
    told = {"model": model, "region": "r", "gpu_type": gpu_type, "desired": "running", "pooled": False}
    return [told | changes] * count


def test_slots_of_several_sizes_are_all_there() -> None:
    """As a layout, which plans may regroup where an agent lets them and no operator chose it."""
    made = scenario(node("A", 1, 4, 1, 2), node("A", 4, 1, 1, 2, regroups=True), node("A", 2, 2, regroups=True))
    held = scenario(node("A", 2, 1, 1, regroups=True, layout_held=True))
    nodes = [*made.document["fleet"]["nodes"], *held.document["fleet"]["nodes"]]
    assert [(one.get("layout"), one.get("regroups", True)) for one in nodes] == [
        ([2, 2], True),
        ([4, 1, 1, 2], True),
        ([4, 2, 1, 1], False),
        ([2, 1, 1], False),
    ]
    odd = scenario(node("A", 3, 3, 1))
    assert odd.document["fleet"]["nodes"] == [{"region": "r", "count": 1, "slots": 2, "gpus": 3}]
    assert "Of 1 nodes only the largest slots are there" in odd.text()
    assert "only the largest" not in made.text()


def test_plans_regroup_where_the_service_lets_them() -> None:
    told = {"plan_layouts": True, "plan_layout_hold_s": 7.0}
    planning = scenario(node("A", 2, regroups=True), settings=told).document["planning"]
    assert (planning["layouts"], planning["layout_hold_s"]) == (True, 7.0)
    assert "layouts" not in scenario(node("A", 2), settings=told).document["planning"], "no node may be regrouped"


def runnable(made: LiveScenario) -> Scenario:
    """The scenario with a profile that there is, and some requests."""
    document = made.document
    traffic = {"rate_per_s": 0.1, "duration_s": 600.0, "origins": {"r": 1}, "tiers": {"IW-F": 1}}
    lengths = {"prompt_tokens": {"median": 600, "most": 2000}, "output_tokens": {"median": 150, "most": 300}}
    document["fleet"] |= {"profile": str(SHIPPED / "h800.toml"), "cost_per_hour": {"H800": 2.0}}
    return Scenario.model_validate(document | {"traffic": {"kind": "generated"} | traffic | lengths})


def test_a_fleet_of_mixed_slots_is_simulated() -> None:
    """Those of the most GPUs are placed first: small ones, which spread over nodes, leave them the large slots."""
    sizes = {"weights_bytes": 10**10, "kv_bytes_per_token": 10**5, "context_tokens": 9999}
    given = {
        "models": [{"name": "m", **sizes}, {"name": "n", **sizes}],
        "profiles": [profile("m", "A", 5.0), profile("n", "A", 4.0, gpus=2)],
        "kv_bytes": {"A": [10**10]},
    }
    nodes = (node("A", 2), node("A", 2), node("A", 1, 1, 1))
    made = scenario(*nodes, instances=[*running("m", 4), *running("n", 2)], **given)
    assert made.document["fleet"]["instances"] == [
        {"model": "m", "region": "r", "count": 3},
        {"model": "n", "region": "r", "count": 2},
    ]
    assert "no node that takes any has a free slot are left out: 1 of m in r." in made.text()
    assert simulate(runnable(made)).result.requests
    fitting = scenario(node("A", 2, 1, 1), instances=running("m", 3), **given)
    assert "a free slot" not in fitting.text()
    assert fitting.document["fleet"]["instances"] == [{"model": "m", "region": "r", "count": 3}]
    assert simulate(runnable(fitting)).result.requests


OTHERWISE = {"scaling.instances_min", "scaling.instances_max", "planning.learn_s"} | {
    f"provisioning.{key}" for key in ("local_s", "remote_s", "spot_same_s", "spot_other_s", "weights")
}
"""Keys that have their values from profiles, endpoints, instances and the demand."""
AS_PLANNED = {"pools", "pool_fill", "pool_prompt_tokens", "pool_output_tokens", "pool_tbt_s", "pool_round_s"} | {
    "reserve", "reserve_quantile", "reserve_correlation"
}  # fmt: skip
"""Keys of planning that are as in the plan in force."""
ASSUMED = {"scaling.beyond_at", "scaling.below_at", "scaling.chiron_theta", "planning.forecasters"} | {
    "provisioning.spot_same_spread", "provisioning.spot_same_most_s"
}  # fmt: skip
"""Keys that the service has no settings for."""
NO_KEY = {
    *("scale_start_patience_s", "scale_failed_patience_s", "scale_retry_s"),
    *("spot_notice_s", "spot_lease_min_s", "spot_lease_max_s"),
    *("forecast_history_s", "forecast_keep_days", "forecast_task_series_max"),
    *("placement_time_limit_s", "placement_gap", "profile_correction_max"),
    *("pools_enabled", "pool_fill", "pool_prompt_tokens", "pool_output_tokens", "pool_tbt_s", "pool_round_s"),
    *("plan_reserve", "plan_reserve_quantile", "plan_reserve_correlation"),
    *("plan_approval", "plan_gpus_moved_max", "plan_share_moved_max", "plan_cost_change_max", "plan_keep_days"),
    *("plan_forecasts_s", "plan_forecasts_max"),
}
"""Settings of scaling and planning that no key takes over, but for what a plan in force says."""
SCALES_AND_PLANS = ("scale_", "spot_", "forecast_", "placement_", "pool", "plan_", "profile_", "route_", "slo_")


def test_no_setting_of_scaling_and_planning_is_forgotten() -> None:
    """A new key, or a new setting, is taken over or named here as one that is not."""
    parts: dict[str, type[Part]] = {"scaling": ScalingPart, "planning": PlanningPart, "provisioning": ProvisioningPart}
    keys = {f"{table}.{key}" for table, part in parts.items() for key in part.model_fields}
    taken = {key for key in SETTINGS if key.partition(".")[0] in parts}
    assert taken | OTHERWISE | {f"planning.{key}" for key in AS_PLANNED} | ASSUMED == keys
    assert set(SETTINGS.values()) <= Settings.model_fields.keys()
    named = {name for name in Settings.model_fields if name.startswith(SCALES_AND_PLANS)}
    assert named - set(SETTINGS.values()) == NO_KEY


def changed(name: str) -> Any:
    """Another value of a setting than its default."""
    default = Settings.model_fields[name].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default - 1
    return "reactive" if isinstance(default, str) else round(0.95 * default, 3)


def test_settings_are_those_of_the_service() -> None:
    told = {name: changed(name) for name in SETTINGS.values()}
    assert Settings.model_validate(told)
    document = scenario(node("A", 2, regroups=True), settings=told).document
    for key, name in SETTINGS.items():
        value: Any = document
        for part in key.split("."):
            value = value[part]
        assert value == told[name] != Settings.model_fields[name].default, key
    assert Scenario.model_validate(document)
    assert "may not be read" not in scenario(node("A", 2), settings=told).text()
    assert "The settings of the service may not be read with this key" in scenario(node("A", 2)).text()


def test_spot_instances_without_a_greatest_age_are_never_stopped() -> None:
    document = scenario(node("A", 2), settings={"spot_max_age_s": None}).document
    assert document["scaling"]["spot_max_age_s"] == document["traffic"]["until_s"] == 3600


def test_starts_take_what_plans_count() -> None:
    """From afar twelve times as long, and weights are where a model has instances."""
    regions = [{"name": name, "position": 0} for name in ("r", "s")]
    far = running("m", 1, region="s", desired="spot")
    made = scenario(node("A", 2), node("B", 1), regions=regions, instances=[*running("m", 1), *far])
    assert made.document["provisioning"] == {
        "local_s": 60.0,
        "remote_s": 720.0,
        "spot_same_s": 60.0,
        "spot_other_s": 60.0,
        "weights": {"m": ["r", "s"], "n": []},
    }


def test_models_without_an_endpoint_are_refused() -> None:
    with pytest.raises(LiveError, match=r"no endpoint is left of the models that could be simulated: m, n"):
        scenario(node("A", 2), endpoints=[])
    base = {"name": "base", "weights_bytes": 10**10, "kv_bytes_per_token": 1, "context_tokens": 9}
    models = [base, base | {"name": "m", "base": "base"}]
    with pytest.raises(LiveError, match=r"could be simulated: base"):
        scenario(node("A", 2), models=models, profiles=[profile("base", "A", 5.0)], instances=running("base", 1))
