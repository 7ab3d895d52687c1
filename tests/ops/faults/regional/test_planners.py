"""Acknowledged plans are counted: none is lost, none in force twice, none applied twice."""

import asyncio
from typing import Any

import httpx2 as httpx

from ops.faults.regional.planners import Planner, PlanPromises, plan_findings


def plan(number: int, state: str = "superseded", before: int | None = None) -> dict[str, Any]:
    return {
        "id": f"plan_{number}",
        "state": state,
        "previous_plan_id": None if before is None else f"plan_{before}",
    }


def applied(number: int, state: str = "draft") -> dict[str, Any]:
    return {"subject": f"plan_{number}", "before": {"state": state}}


def promised(*numbers: int) -> list[PlanPromises]:
    return [PlanPromises(region="north", applied=[f"plan_{number}" for number in numbers])]


CHAIN = [plan(4, "applied", before=2), plan(3, "draft"), plan(2, before=1), plan(1)]


def test_plans_that_replaced_one_another_hold() -> None:
    assert plan_findings(promised(1, 2, 4), CHAIN, [applied(1), applied(2), applied(4)]) == []
    assert plan_findings(promised(), [], []) == []


def test_saying_again_that_the_present_plan_applies_is_no_second_time() -> None:
    assert plan_findings(promised(1, 2, 4), CHAIN, [applied(1), applied(2), applied(4), applied(4, "applied")]) == []


def test_a_plan_that_never_came_into_force_is_found() -> None:
    found = plan_findings(promised(1, 2, 3, 4), CHAIN, [applied(1), applied(2), applied(4)])
    assert found == [
        "plan plan_3, acknowledged by north, is none of those that were in force",
        "plan plan_3, acknowledged by north, was applied 0 times",
    ]


def test_a_plan_that_was_applied_twice_is_found() -> None:
    found = plan_findings(promised(4), CHAIN, [applied(4), applied(4, "superseded")])
    assert found == ["plan plan_4, acknowledged by north, was applied 2 times"]


def test_two_plans_in_force_and_a_ring_are_found() -> None:
    two = [plan(2, "applied"), plan(1, "applied")]
    assert plan_findings(promised(), two, []) == ["2 plans are in force: ['plan_2', 'plan_1']"]
    ring = [plan(2, "applied", before=1), plan(1, before=2)]
    assert plan_findings(promised(), ring, []) == ["plan plan_2 is its own predecessor"]


def test_a_planner_whose_plans_were_all_stale_goes_on_until_one_is_applied() -> None:
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        if request.url.path == "/admin/plans":
            return httpx.Response(200, json={"plan": {"id": "plan_1", "fleet_index": 7}})
        return httpx.Response(409 if len(calls) < 4 else 200, json={})

    async def run() -> Planner:
        planner, stopped = Planner("north", "http://gateway", "key", httpx.MockTransport(answer)), asyncio.Event()
        stopped.set()
        await planner.run(stopped)
        return planner

    promises = asyncio.run(run()).promises
    assert (promises.applied, dict(promises.refused)) == (["plan_1"], {"409": 1})
