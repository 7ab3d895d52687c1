"""What a run of a scaling strategy amounts to: instance hours and what they were for, wasted starts, TTFT."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ops.simulator.results.results import EndpointSeries, Result

HIGH = 0.7
"""Above this effective memory utilization an endpoint is short of room."""
SLOW_S = 2.0
"""A minute is slow if IW-F's 95th percentile of TTFT is above: twice the objective."""
_WINDOW = 5
_HOUR = 60


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Instance hours by what they were for; they add up to all of them.

    Attributes:
        demand: what interactive requests ask for at theta.
        peak: from there to the fullest five minutes of each hour, which a plan of an hour must hold.
        headroom: from there to what the plan counts on: the upper quantile, the forecast's error, beta of NIW.
        minimum: what the minimum of instances adds to that (without a plan: to the demand).
        rounding: whole instances, less what epsilon lets other regions serve.
        beside: what was there beyond the plan, or without one: starts, drains, thresholds, what a strategy puts off.
    """

    demand: float
    peak: float
    headroom: float
    minimum: float
    rounding: float
    beside: float


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """One strategy's run.

    Attributes:
        instance_hours: serving, warming and draining; spot ones are somebody else's.
        warming_hours: of those, what starts took.
        ttft_p95_s, ttft_p99_s, late: of IW-F requests; `late` is the share whose first token was.
        iw_failed, niw_failed: shares of the requests that ended without an answer.
        high_minutes: minutes in which an endpoint was above `HIGH`, over all endpoints.
        high_longest: the longest that one was, in minutes.
        slow_minutes, slow_longest: minutes that were slow, and the longest time without one that was not.
        cpu_s: what the simulation took.
    """

    requests: int
    instance_hours: float
    warming_hours: float
    spot_hours: float
    scale_outs: int
    ttft_p95_s: float
    ttft_p99_s: float
    late: float
    iw_failed: float
    niw_failed: float
    high_minutes: int
    high_longest: int
    slow_minutes: int
    slow_longest: int
    parts: Parts
    cpu_s: float
    event_log_hash: str


def figures_of(result: Result, tokens_per_s: Mapping[str, float], instances_min: int, cpu_s: float) -> StrategyFigures:
    """What a table says of a run. `tokens_per_s`: theta, by model."""
    hours = result.totals.gpu_hours
    tiers = {row.tier: row for row in result.tiers}
    urgent = tiers.get("IW-F")
    high = [[(value or 0.0) > HIGH for value in one.utilization] for one in result.series.endpoints]
    slow = [(p95_s or 0.0) > SLOW_S for one in result.series.tiers if one.tier == "IW-F" for p95_s in one.ttft_p95_s]
    interactive = [row for row in result.tiers if row.tier != "NIW"]
    instance_hours = sum(hours.get(state, 0.0) for state in ("serving", "warming", "draining"))
    return StrategyFigures(
        requests=result.requests,
        instance_hours=instance_hours,
        warming_hours=hours.get("warming", 0.0),
        spot_hours=hours.get("spot", 0.0),
        scale_outs=result.totals.scale_outs,
        ttft_p95_s=urgent.ttft_s.p95 if urgent and urgent.ttft_s else float("nan"),
        ttft_p99_s=urgent.ttft_s.p99 if urgent and urgent.ttft_s else float("nan"),
        late=urgent.ttft_violations if urgent else 0.0,
        iw_failed=sum(row.failed for row in interactive) / max(1, sum(row.requests for row in interactive)),
        niw_failed=tiers["NIW"].failed / tiers["NIW"].requests if "NIW" in tiers else 0.0,
        high_minutes=sum(map(sum, high)),
        high_longest=max(map(_longest, high), default=0),
        slow_minutes=sum(slow),
        slow_longest=_longest(slow),
        parts=parts_of(result.series.endpoints, tokens_per_s, instances_min, instance_hours),
        cpu_s=cpu_s,
        event_log_hash=result.event_log_hash,
    )


def parts_of(
    endpoints: list[EndpointSeries], tokens_per_s: Mapping[str, float], instances_min: int, instance_hours: float
) -> Parts:
    """What the hours were for, from series of a value a minute that begin with an hour."""
    needed = np.array([one.demand for one in endpoints], float)
    needed /= np.array([[tokens_per_s[one.model]] for one in endpoints])
    planned = np.array([one.planned for one in endpoints], float)
    expected = np.array([one.forecast for one in endpoints], float)
    expected /= np.array([[tokens_per_s[one.model]] for one in endpoints])
    unplanned = np.isnan(planned)
    peaks = np.where(unplanned.all(axis=0), needed.sum(axis=0), _peaks(needed.sum(axis=0)))
    expected = np.where(unplanned, needed, expected)
    floor = np.maximum(instances_min - expected, 0.0)
    whole = np.where(unplanned, expected + floor, planned)
    steps = (needed.sum(axis=0), peaks, expected.sum(axis=0), (expected + floor).sum(axis=0), whole.sum(axis=0))
    demand, peak, headroom, minimum, rounding = np.diff([0.0, *(step.sum() / _HOUR for step in steps)]).tolist()
    return Parts(
        demand=demand,
        peak=peak,
        headroom=headroom,
        minimum=minimum,
        rounding=rounding,
        beside=instance_hours - float(whole.sum()) / _HOUR,
    )


def _peaks(needed: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For every minute the mean of the fullest five minutes of its hour."""
    peaks = np.empty_like(needed)
    for first in range(0, len(needed), _HOUR):
        hour = needed[first : first + _HOUR]
        windows = [hour[place : place + _WINDOW].mean() for place in range(0, len(hour), _WINDOW)]
        peaks[first : first + _HOUR] = max(windows)
    return peaks


def _longest(flags: list[bool]) -> int:
    """The longest run of True."""
    return max((len(list(run)) for flag, run in groupby(flags) if flag), default=0)
