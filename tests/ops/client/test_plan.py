"""A plan on the screen."""

from typing import Any

import pytest

from ops.client.plan import show_plan

PLAN = {
    "id": "plan_1",
    "state": "applied",
    "window_start_s": 3600,
    "gap": None,
    "solver": "highs",
    "status": "optimal",
    "solve_time_s": 0.1,
    "objective_per_hour": 6.0,
    "reason": "solved",
    "approval_reason": None,
}
POOL: dict[str, Any] = {"region": "east", "gpu_type": "H800", "before": 1, "after": 2, "pooled": []}
RESERVE = {
    "gpus": 2,
    "missing_gpus": 1,
    "reason": "2 models need 1.30 GPUs",
    "held": [{"model": "a", "instances": 0, "reason": "served from the reserve's 2 slots"}],
    "left_out": {"b": "no latency in the profile on H800"},
}


def shown(capsys: pytest.CaptureFixture[str], pool: dict[str, Any]) -> list[str]:
    show_plan({"plan": PLAN, "index": 1, "entries": [], "pools": [pool], "unserved": []})
    return capsys.readouterr().out.splitlines()


def test_a_reserve_with_what_it_holds_and_what_not(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, POOL | {"reserve": RESERVE})
    assert lines[-4:] == [
        "pool of H800 in east: 1 -> 2 GPUs",
        "reserve in it: 2 GPUs, 1 missing; 2 models need 1.30 GPUs",
        "  holds a: served from the reserve's 2 slots",
        "  does not hold b: no latency in the profile on H800",
    ]


def test_a_pool_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, POOL | {"pooled": [{"model": "a"}, {"model": "b"}]})
    assert lines[-1] == "pool of H800 in east: 1 -> 2 GPUs for a, b"
