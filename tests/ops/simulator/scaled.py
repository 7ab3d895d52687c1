"""Small scenarios whose instances are scaled, and worlds that are checked after each event."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world.world import World

PROFILE = Path(__file__).parents[3] / "ops" / "profiles" / "h800.toml"
REGIONS = ["east", "west"]
PATHS = {"H800": str(PROFILE), "H20": str(PROFILE.with_name("h20.toml"))}
KV_BYTES = {"H800": 3 * 10**9, "H20": 4 * 10**9}


def node(region: str, gpu_type: str, **keys: Any) -> dict[str, Any]:
    """A node of one of two GPU types. `keys`: others of its table."""
    return {"region": region, "profile": PATHS[gpu_type], "kv_bytes": KV_BYTES[gpu_type], **keys}


def scaled(strategy: str = "lt-i", **changes: Any) -> Scenario:
    """Two models in two regions. `changes`: tables, or keys of tables."""
    document: dict[str, Any] = {
        "name": "scaled",
        "regions": REGIONS,
        "latencies_ms": {"east > west": 30, "west > east": 50},
        "traffic": {
            "kind": "generated",
            "rate_per_s": 1.0,
            "duration_s": 900.0,
            "cv": 2.0,
            "origins": {"east": 2, "west": 1},
            "tiers": {"IW-F": 2, "IW-N": 1, "NIW": 1},
            "prompt_tokens": {"median": 600, "most": 2000},
            "output_tokens": {"median": 150, "most": 300},
        },
        "models": [
            {"name": name, "weights_bytes": 15 * 10**9, "kv_bytes_per_token": 800_000, "tokens_per_s": rate}
            for name, rate in (("a", 400.0), ("b", 600.0))
        ],
        "fleet": {
            "serving": "dedicated",
            "profile": str(PROFILE),
            "kv_bytes": 3 * 10**9,
            "instances": [{"model": model, "region": region, "count": 1} for model in ("a", "b") for region in REGIONS],
            "nodes": [{"region": region, "count": 2, "slots": 3} for region in REGIONS],
        },
        "policy": {"batching": "prefill-first"},
        "scaling": {"strategy": strategy, "instances_min": 1, "instances_max": 4, "cooldown_s": 15},
        "planning": {"learn_s": 300, "forecasters": ["last hour's maximum"]},
        "provisioning": {"spot_same_s": 20, "spot_same_spread": 0, "spot_other_s": 60, "local_s": 60, "remote_s": 300},
    }
    return changed_scenario(document, changes)


def changed_scenario(document: dict[str, Any], changes: dict[str, Any]) -> Scenario:
    """A scenario with some of its tables, or keys of its tables, replaced."""
    for table, keys in changes.items():
        document[table] = {**document[table], **keys} if isinstance(keys, dict) and table in document else keys
    return Scenario.model_validate(document)


def run_checked(world: World, check: Callable[[], None]) -> None:
    """Run a world to its end, with a check after each event."""
    run = world.events.run

    def checked(most: int) -> bool:
        for _ in range(most):
            goes_on = run(1)
            check()
            if not goes_on:
                return False
        return True

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(world.events, "run", checked)
        assert list(world.run())
