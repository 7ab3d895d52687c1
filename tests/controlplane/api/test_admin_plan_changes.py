"""A plan for review over the API: totals, filters, groups, pages, and comparison with another plan."""

from typing import Any

import pytest

from controlplane.store.fleet import fleet_index, put_gpu_type, put_profile
from controlplane.store.plans import Plan, PlanEntry, add_plan
from controlplane.store.session import Database
from controlplane.store.tables import Profile
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import a_plan

REGIONS = ("us-east", "us-west")
CELLS = [
    # model, region, gpu type, before, after, constraint, cost if not
    ("llama", "us-east", "H800", 1, 4, "home", 30.0),
    ("llama", "us-west", "H800", 2, 2, "minimum", 0.0),
    ("llama", "us-west", "H20", 3, 0, "cost", 1.5),
    ("Qwen/Qwen3-8B", "us-east", "H800", 0, 1, "pin", 99.0),
]


@pytest.fixture
def plan_id(fleet: None, database: Database) -> str:
    """Four cells on two GPU types; Qwen has no profile any more."""
    with database.transaction() as session:
        put_gpu_type(session, name="H20", memory_bytes=1 << 36, cost_per_hour=1.0)
        put_profile(session, Profile(model="llama", gpu_type="H20", tokens_per_s=900.0, gpus=2, load_time_s=1.0))
    return add(
        database,
        CELLS,
        unserved=[
            {"model": "llama", "region": None, "tokens_per_s": 40.0, "reason": "full"},
            {"model": "llama", "region": "us-west", "tokens_per_s": 900.0, "reason": "not served at home"},
            {"model": "llama", "region": "us-west", "tokens_per_s": 0.0, "reason": "maximum 2"},
        ],
        pools=[
            {
                "region": "us-east",
                "gpu_type": "H20",
                "worker_gpus": 1,
                "before": 0,
                "after": 3,
                "pooled": [
                    {"model": "a", "occupancy": 0.5, "before": True, "reason": "x"},
                    {"model": "b", "occupancy": 0.5, "before": False, "reason": "x"},
                ],
                "reserve": {
                    "gpus": 2,
                    "missing_gpus": 1,
                    "reason": "the sum",
                    "held": [{"model": "c", "instances": 1, "reason": "x"}],
                    "left_out": {},
                },
            }
        ],
        inputs={
            "forecasts": {
                "origin_s": 3000,
                "quantile": 0.9,
                "series": [
                    {"model": "llama", "region": region, "forecaster": "arima", "stand_in": None}
                    | {"peak_q50": 10.0 * place, "peak_upper": 20.0 * place}
                    for place, region in enumerate(REGIONS)
                ],
            },
            "problem": {"demand": [{"model": "llama", "region": "us-west", "tokens_per_s": [1.0, 20.0]}]},
        },
    )


def add(database: Database, cells: list[tuple[Any, ...]], **changes: Any) -> str:
    with database.transaction() as session:
        plan, _ = a_plan(fleet_index(session), [], **changes)
        plan_id = plan.id
        names = ("model", "region", "gpu_type", "before", "after", "constraint", "cost_if_not")
        entries = [
            PlanEntry(plan_id=plan.id, reason=f"because of {cell[5]}", **dict(zip(names, cell, strict=True)))
            for cell in cells
        ]
        assert add_plan(session, plan, entries)
    return plan_id


def test_a_summary_adds_up_what_a_plan_costs_and_moves(ask: Ask, plan_id: str) -> None:
    summary = ask("GET", f"/admin/plans/{plan_id}/summary", role="viewer")
    totals = summary["totals"]
    assert (totals["cells"], totals["changed"], totals["started"], totals["stopped"]) == (4, 3, 4, 3)
    assert (totals["instances_before"], totals["instances_after"]) == (6, 7)
    assert (totals["gpus_before"], totals["gpus_after"]) == (1 + 2 + 3 * 2, 4 + 2)
    assert (totals["price_before"], totals["price_after"]) == (3 * 2.5 + 3 * 2.0, 6 * 2.5)
    assert (totals["unpriced"], totals["cost_if_not_max"]) == (1, 99.0)
    assert (summary["unserved_tokens_per_s"], summary["away_tokens_per_s"], summary["shortfalls"]) == (40.0, 900.0, 3)
    assert [each["tokens_per_s"] for each in summary["largest_shortfalls"]] == [900.0, 40.0, 0.0]
    [pool] = summary["pools"]
    assert (pool["before"], pool["after"], pool["endpoints"], pool["joined"]) == (0, 3, 2, ["b"])
    assert pool["worker_gpus"] == 1
    assert pool["reserve"] == {"gpus": 2, "missing_gpus": 1, "endpoints": 1, "reason": "the sum"}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, [0, 2, 3]),
        ({"only_changes": False}, [0, 2, 3, 1]),
        ({"model": "llama"}, [0, 2]),
        ({"region": "us-west", "only_changes": False}, [2, 1]),
        ({"gpu_type": "H20"}, [2]),
        ({"constraint": "pin"}, [3]),
        ({"words": "LLA"}, [0, 2]),
        ({"words": "because of ho"}, [0]),
        ({"words": "%"}, []),
    ],
)
def test_changes_by_filter(ask: Ask, plan_id: str, query: dict[str, Any], found: list[int]) -> None:
    answer = ask("GET", f"/admin/plans/{plan_id}/changes", role="viewer", params=query)
    cells = [
        (each["model"], each["region"], each["gpu_type"], each["before"], each["after"]) for each in answer["data"]
    ]
    assert cells == [CELLS[place][:5] for place in found]
    assert answer["totals"]["cells"] == len(found)


def test_changes_in_pages(ask: Ask, plan_id: str) -> None:
    query: dict[str, Any] = {"only_changes": False, "limit": 3}
    first = ask("GET", f"/admin/plans/{plan_id}/changes", params=query)
    assert (len(first["data"]), first["has_more"], first["next"]) == (3, True, 3)
    last = ask("GET", f"/admin/plans/{plan_id}/changes", params=query | {"after": 3})
    assert (len(last["data"]), last["has_more"], last["next"]) == (1, False, None)
    whole = ask("GET", f"/admin/plans/{plan_id}/changes", params={"only_changes": False})["data"]
    assert first["data"] + last["data"] == whole
    assert whole[0] == {
        **dict(zip(("model", "region", "gpu_type", "before", "after"), CELLS[0], strict=False)),
        "constraint": "home",
        "reason": "because of home",
        "cost_if_not": 30.0,
        "gpus": 1,
        "price": 2.5,
        "tokens_per_s": 12_000.0,
    }


@pytest.mark.parametrize(
    ("by", "found"),
    [
        ("model", [("llama", 3, 3), ("Qwen/Qwen3-8B", 1, 0)]),
        ("region", [("us-west", 0, 3), ("us-east", 4, 0)]),
        ("gpu_type", [("H20", 0, 3), ("H800", 4, 0)]),
        ("constraint", [("cost", 0, 3), ("home", 3, 0), ("pin", 1, 0), ("minimum", 0, 0)]),
    ],
)
def test_changes_in_groups(ask: Ask, plan_id: str, by: str, found: list[tuple[str, int, int]]) -> None:
    query = {"by": by, "only_changes": False}
    answer = ask("GET", f"/admin/plans/{plan_id}/groups", role="viewer", params=query)
    assert [(each["name"], each["started"], each["stopped"]) for each in answer["data"]] == found
    page = ask("GET", f"/admin/plans/{plan_id}/groups", params=query | {"limit": 1, "after": 1})
    assert [each["name"] for each in page["data"]] == [found[1][0]]


def test_a_plan_against_an_earlier_one(ask: Ask, database: Database, plan_id: str) -> None:
    earlier = add(
        database,
        [
            ("llama", "us-east", "H800", 0, 4, "home", 1.0),
            ("llama", "us-west", "H800", 0, 5, "home", 1.0),
            ("gone", "us-west", "H800", 0, 1, "home", 1.0),
        ],
    )
    changes = ask("GET", f"/admin/plans/{plan_id}/changes", params={"against": earlier})["data"]
    assert [(each["model"], each["region"], each["before"], each["after"]) for each in changes] == [
        ("llama", "us-west", 5, 2),
        ("Qwen/Qwen3-8B", "us-east", 0, 1),
        ("gone", "us-west", 1, 0),
    ]
    assert {each["cost_if_not"] for each in changes} == {None}
    assert changes[2]["reason"] == "not offered any more"
    assert ask("GET", f"/admin/plans/{plan_id}/summary", params={"against": earlier})["totals"]["changed"] == 3
    ask("GET", f"/admin/plans/{plan_id}/changes", params={"against": "plan_0"}, status=404)


def test_what_a_plan_expects_of_an_endpoint(ask: Ask, database: Database, plan_id: str) -> None:
    where = {"model": "llama", "region": "us-west"}
    shown = ask("GET", f"/admin/plans/{plan_id}/endpoint", role="viewer", params=where)
    assert shown["expected"]["peak_upper"] == 20.0
    assert (shown["expected"]["origin_s"], shown["expected"]["quantile"]) == (3000, 0.9)
    assert shown["demand"] == [1.0, 20.0]
    assert [(each["gpu_type"], each["tokens_per_s"]) for each in shown["cells"]] == [("H20", 900.0), ("H800", 12_000.0)]
    unknown = ask("GET", f"/admin/plans/{plan_id}/endpoint", params={"model": 'x"', "region": "mars"}, status=400)
    assert unknown["param"] == "model"
    other = {"model": "Qwen/Qwen3-8B", "region": "us-east"}
    none = ask("GET", f"/admin/plans/{plan_id}/endpoint", params=other)
    assert (none["expected"], none["demand"], len(none["cells"])) == (None, [], 1)
    with database.transaction() as session:
        session.get_one(Plan, plan_id).inputs = None
    assert ask("GET", f"/admin/plans/{plan_id}/endpoint", params=where)["expected"] is None


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("changes", {"constraint": "whim"}, "constraint"),
        ("changes", {"limit": 1001}, "limit"),
        ("changes", {"after": -1}, "after"),
        ("changes", {"words": "\x00"}, "words"),
        ("groups", {"by": "reason"}, "by"),
        ("groups", {}, "by"),
    ],
)
def test_what_cannot_be_asked_of_a_plan(ask: Ask, plan_id: str, path: str, query: dict[str, Any], param: str) -> None:
    assert ask("GET", f"/admin/plans/{plan_id}/{path}", params=query, status=400)["param"] == param
    if param != "by":
        ask("GET", f"/admin/plans/plan_0/{path}", status=404)


def test_plans_by_state(ask: Ask, plan_id: str) -> None:
    assert [each["id"] for each in ask("GET", "/admin/plans", params={"state": "draft"})["data"]] == [plan_id]
    assert ask("GET", "/admin/plans", params={"state": "applied"})["data"] == []
    ask("GET", "/admin/plans", params={"state": "odd"}, status=400)
