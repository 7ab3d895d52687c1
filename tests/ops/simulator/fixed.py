"""Small scenarios whose servers are there from the beginning to the end."""

from typing import Any

from ops.simulator.scenario.scenario import Scenario
from tests.ops.simulator.scaled import PROFILE


def scenario_of(serving: str, *, seconds: float = 30.0, rate_per_s: float = 4.0, **fleet: Any) -> Scenario:
    """Three models in two regions. `fleet`: keys of its table."""
    fleets: dict[str, dict[str, Any]] = {
        "dedicated": {
            "instances": [
                {"model": "a", "region": "east", "count": 2},
                {"model": "b", "region": "east"},
                {"model": "b", "region": "west", "kind": "IW"},
                {"model": "c", "region": "west"},
            ]
        },
        "pooled": {"prefill_slots": 1, "decode_slots": 2, "weights_bytes": 40 * 10**9},
        "both": {"serving": "pooled", "both_slots": 2, "weights_bytes": 40 * 10**9},
        "request-level": {"gpus": 3},
        "static": {"gpus": 2, "weights_bytes": 40 * 10**9},
        "split": {"serving": "request-level", "prefill_slots": 1, "decode_slots": 2},
    }
    return Scenario.model_validate(
        {
            "name": "test",
            "regions": ["east", "west"],
            "latencies_ms": {"east > west": 30, "west > east": 50},
            "traffic": {
                "kind": "generated",
                "rate_per_s": rate_per_s,
                "duration_s": seconds,
                "cv": 2.0,
                "zipf": 0.5,
                "origins": {"east": 2, "west": 1},
                "tiers": {"IW-F": 2, "IW-N": 1, "NIW": 1},
                "prompt_tokens": {"median": 300, "most": 2000},
                "output_tokens": {"median": 40, "most": 300},
            },
            "models": [
                {"name": name, "weights_bytes": 15 * 10**9, "kv_bytes_per_token": 200_000} for name in ("a", "b", "c")
            ],
            "fleet": {
                "serving": serving,
                "profile": str(PROFILE),
                "kv_bytes": 2 * 10**9,
                **fleets[serving],
                **fleet,
            },
        }
    )
