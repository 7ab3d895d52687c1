"""Which loops are late, and what the system's health is."""

import pytest

from controlplane.policies.readiness import (
    HealthFacts,
    HealthStatus,
    Loop,
    LoopFacts,
    choose_health,
    choose_late_loops,
    late_after_s,
)

NOW_S = 1_000_000.0
PERIODS_S = {Loop.SCALE: 15.0, Loop.MEASURE: 60.0, Loop.PLAN: 2400.0}


@pytest.mark.parametrize(("period_s", "late_s"), [(1.0, 61.0), (15.0, 75.0), (60.0, 180.0), (3600.0, 4200.0)])
def test_a_loop_may_miss_two_periods_but_an_hourly_one_ten_minutes(period_s: float, late_s: float) -> None:
    assert late_after_s(period_s) == late_s


@pytest.mark.parametrize(
    ("loop", "since_ago_s", "success_ago_s", "late"),
    [
        (Loop.SCALE, 9000.0, 0.0, False),
        (Loop.SCALE, 9000.0, 75.0, False),
        (Loop.SCALE, 9000.0, 76.0, True),
        (Loop.MEASURE, 9000.0, 76.0, False),
        (Loop.PLAN, 9000.0, 2999.0, False),
        (Loop.PLAN, 9000.0, 3001.0, True),
        (Loop.PLAN, 2999.0, None, False),
        (Loop.PLAN, 3001.0, None, True),
    ],
    ids=str,
)
def test_late_loops(loop: Loop, since_ago_s: float, success_ago_s: float | None, late: bool) -> None:
    facts = LoopFacts(
        loop=loop,
        since_s=NOW_S - since_ago_s,
        last_success_s=None if success_ago_s is None else NOW_S - success_ago_s,
        last_failure_s=NOW_S,
        last_error="a failure alone makes no loop late",
    )
    assert choose_late_loops((facts,), NOW_S, PERIODS_S) == ((loop,) if late else ())


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (HealthFacts(), HealthStatus.OK),
        (HealthFacts(away=("redis",)), HealthStatus.DEGRADED),
        (HealthFacts(late=(Loop.PLAN,)), HealthStatus.DEGRADED),
        (HealthFacts(lost=("n1",)), HealthStatus.DEGRADED),
        (HealthFacts(missing=("catalog",)), HealthStatus.UNAVAILABLE),
        (HealthFacts(missing=("keys",), away=("postgres",), late=(Loop.BEAT,)), HealthStatus.UNAVAILABLE),
    ],
)
def test_the_verdict_keeps_its_facts(facts: HealthFacts, status: HealthStatus) -> None:
    health = choose_health(facts)
    assert health.status == status
    assert {name: getattr(health, name) for name in vars(facts)} == vars(facts)
