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


def test_the_size_of_its_slots_says_which_of_several_pools_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    pools = [POOL | {"worker_gpus": 1}, POOL | {"worker_gpus": 4, "before": 0, "after": 8}]
    elsewhere = POOL | {"region": "west", "worker_gpus": 4}
    show_plan({"plan": PLAN, "index": 1, "entries": [], "pools": [*pools, elsewhere], "unserved": []})
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "pool of H800 in east, slots of 1: 1 -> 2 GPUs",
        "pool of H800 in east, slots of 4: 0 -> 8 GPUs",
        "pool of H800 in west: 1 -> 2 GPUs",
    ]
    pools[0] |= {"before": 2}
    show_plan({"plan": PLAN, "index": 1, "entries": [], "pools": pools, "unserved": []}, changes_only=True)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("pool")] == [
        "pool of H800 in east, slots of 4: 0 -> 8 GPUs"
    ]
    restored = [POOL, POOL | {"worker_gpus": 4, "after": 0}]
    show_plan({"plan": PLAN, "index": 1, "entries": [], "pools": restored, "unserved": []})
    assert "pool of H800 in east: 1 -> 2 GPUs" in capsys.readouterr().out.splitlines()
