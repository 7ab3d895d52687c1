"""A plan in words: each of its parts is told, and what is not known is said to be so."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.plan_explanations import (
    CHANGES_MAX,
    CellSummary,
    ForecastRecord,
    PlanSummary,
    PoolSummary,
    SeriesSummary,
    explain_plan,
)

SERIES = SeriesSummary(name="a in east", forecaster="arima", peak_q50=800.0, peak_upper=1000.0, fallback=None)
LATE = SeriesSummary(name="b in east", forecaster="none", peak_q50=1.0, peak_upper=2.0, fallback="late; the last hour")
OUT = CellSummary(
    name="a in east on H800", before=1, after=3, reason="demand grows", constraint="home", cost_if_not=1234.5
)
KEPT = CellSummary(name="b in east on H800", before=2, after=2, reason="no change", constraint="pin", cost_if_not=0.0)
PLAN = PlanSummary(
    plan_id="plan_1",
    state="applied",
    window_start_s=1_795_273_200,
    made_by="the schedule",
    index=7,
    approved_by="automatic",
    approval_reason=None,
    previous_plan_id="plan_0",
    reason="optimal within the gap",
    solver="highs",
    status="optimal",
    solve_time_s=0.25,
    objective_per_hour=100.0,
    bound_per_hour=99.5,
    gap=0.005,
    origin_s=1_795_272_600,
    quantile=0.9,
    series=(SERIES, LATE),
    cells=(OUT, KEPT),
    pools=(),
    shortfalls=(),
    day_before=ForecastRecord(hours=48, covered=43, error_sum=12.0, actual_sum=100.0),
    outcome=None,
)


def tell(**changes: object) -> str:
    return explain_plan(dataclasses.replace(PLAN, **changes))  # type: ignore[arg-type]


def test_the_whole_of_a_plan() -> None:
    assert (
        tell()
        == """\
Plan plan_1 for 15:00 to 16:00 UTC on 2026-11-21: applied.
Made by the schedule at fleet index 7. Optimal within the gap.
It went into force by itself; no limit of the approval policy was exceeded.
Before it, plan plan_0 was in force.

What was expected
  2 endpoints from 14:50 UTC: peaks of the coming hour add up to 1,002 tokens/s at the 0.9 quantile, 801 at the median.
  The largest: a in east 1,000 (arima), b in east 2 (none).
  Forecast by arima for 1.
  1 endpoint had no forecast in time:
  - b in east: late; the last hour

What changes, and why
  2 instances more, 0 fewer; 1 count as before.
  - a in east on H800: 1 -> 3. Demand grows. Left as it was, the objective rises by 1,234.50 an hour.

What binds
  1 count: demand that must be served at home
  1 count: a pin

What is not served
  Nothing: the plan covers all that was expected.

How sure this is
  highs (optimal, 0.25 s): objective 100.00 an hour; no plan is better by more than 0.50, a gap of 0.500%.
  In the day before, 43 of 48 peaks of the largest endpoints (90%) stayed under their upper forecast, \
which aims at 90%; the weighted error of the median was 12.0%."""
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "draft", "approved_by": None, "approval_reason": "moves 9 GPUs"}, "waits for an operator: Moves 9"),
        ({"approved_by": "ann", "approval_reason": "moves 9 GPUs"}, "It needed an operator: Moves 9 GPUs."),
        ({"approved_by": "ann"}, "Approved by ann."),
        ({"series": ()}, "no endpoint had interactive demand"),
        ({"origin_s": None, "series": ()}, "No solver was asked."),
        ({"cells": ()}, "no instance is placed or planned"),
        ({"cells": (KEPT,)}, "Nothing: every count stays"),
        ({"shortfalls": ("a in east: 5 tokens/s; no GPUs left",)}, "- a in east: 5 tokens/s; no GPUs left"),
        ({"status": "failed", "gap": None}, "there is no new placement, the present one stays"),
        ({"gap": None}, "no bound is known"),
        ({"day_before": None}, "no forecast can be held against what came"),
        ({"outcome": ForecastRecord(hours=2, covered=2, error_sum=0.0, actual_sum=0.0)}, "In this very hour, 2 of 2"),
        (
            {"pools": (PoolSummary(name="H800 in east", before=1, after=2, endpoints=("x", "y")),)},
            "1 -> 2 GPUs for 2 end",
        ),
        (
            {
                "pools": (
                    PoolSummary(name="H800 in east", before=1, after=1, endpoints=(), reserve="reserve of 1 GPUs"),
                )
            },
            "- H800 in east: 1 GPUs for 0 endpoints; reserve of 1 GPUs",
        ),
    ],
)
def test_what_is_said_when(changes: dict[str, object], words: str) -> None:
    assert words in tell(**changes)


def test_of_many_changes_those_that_matter_most_are_told() -> None:
    cells = tuple(
        CellSummary(name=f"m{n}", before=0, after=1, reason="r", constraint="home", cost_if_not=float(n))
        for n in range(CHANGES_MAX + 5)
    )
    told = tell(cells=cells)
    assert "m4:" not in told
    assert f"m{CHANGES_MAX + 4}:" in told
    assert "and 5 changes that cost less not to make" in told


@given(reason=st.text(max_size=20), hours=st.integers(0, 3), gap=st.none() | st.floats(0, 1))
def test_any_plan_can_be_told(reason: str, hours: int, gap: float | None) -> None:
    record = ForecastRecord(hours=hours, covered=0, error_sum=1.0, actual_sum=0.0)
    assert tell(reason=reason, outcome=record, day_before=record, gap=gap).startswith("Plan plan_1")
