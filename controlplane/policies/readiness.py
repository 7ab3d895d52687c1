"""Whether the system serves as it should: one verdict for probes, dashboards and people.

`choose_late_loops` says which loops have not succeeded for too long, `choose_health` puts everything together. Only
what keeps a gateway from serving interactive requests makes it unavailable; everything else degrades it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_SLACK_MIN_S, _SLACK_MAX_S = 60.0, 600.0


class Loop(StrEnum):
    """What runs again and again: processes (up to the dispatcher) and scheduled loops."""

    WORKER = "worker"
    BEAT = "beat"
    FORECASTER = "forecaster"
    DISPATCHER = "dispatcher"
    MEASURE = "measure"
    FORECAST = "forecast"
    CORRECT = "correct"
    PLAN = "plan"
    SCALE = "scale"
    PREDICT = "predict"
    ROLL_OUT = "roll_out"
    EXPIRE = "expire"
    SWEEP = "sweep"


class HealthStatus(StrEnum):
    """The verdict."""

    OK = "ok"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """A loop's history in Unix seconds. `since_s`: since when it is expected to run; `last_error`: of its last failure,
    which may be older than its last success.
    """

    loop: Loop
    since_s: float
    last_success_s: float | None = None
    last_failure_s: float | None = None
    last_error: str | None = None
    last_process: str | None = None


def late_after_s(period_s: float) -> float:
    """After how many seconds without a success a loop with this period is late: two more periods, at least a minute
    and at most ten.
    """
    return period_s + min(max(2 * period_s, _SLACK_MIN_S), _SLACK_MAX_S)


def choose_late_loops(loops: tuple[LoopFacts, ...], now_s: float, periods_s: Mapping[Loop, float]) -> tuple[Loop, ...]:
    """The loops whose last success is too old. One that never succeeded counts from when it was first expected."""
    return tuple(
        facts.loop
        for facts in loops
        if now_s - max(facts.since_s, facts.last_success_s or 0.0) > late_after_s(periods_s[facts.loop])
    )


@dataclass(frozen=True, kw_only=True)
class HealthFacts:
    """What one gateway knows. `missing`: what it needs to serve and lacks; `away`: servers that do not answer; `late`:
    loops; `lost`: nodes that shall serve and send no heartbeats; `behind`: copies of the database that are too old
    to be read while the primary answers; `replica_age_s`: how old the region's copy may be, None where there is none,
    or it does not answer, or nothing is known. `term`: the primary's; `reported_term`: the newest that nodes have seen,
    which obey nobody of an older one; both None while nobody knows.
    """

    missing: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    late: tuple[Loop, ...] = ()
    lost: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    replica_age_s: float | None = None
    term: int | None = None
    reported_term: int | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether nodes have seen a primary that is newer than this one."""
        return (self.reported_term or 0) > (self.term or 0)


@dataclass(frozen=True, kw_only=True)
class Health(HealthFacts):
    """The facts with their verdict."""

    status: HealthStatus


def choose_health(facts: HealthFacts) -> Health:
    """The verdict on these facts."""
    if facts.missing:
        status = HealthStatus.UNAVAILABLE
    elif facts.away or facts.late or facts.lost or facts.behind or facts.is_replaced:
        status = HealthStatus.DEGRADED
    else:
        status = HealthStatus.OK
    return Health(status=status, **vars(facts))
