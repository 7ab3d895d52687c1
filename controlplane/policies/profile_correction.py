"""Correct profiles by what instances do: theta, the input tokens/s of one instance at its objectives (SageServe 5).

Profiles state theta as the rate at which an instance uses a certain share of its KV memory. By Little's law, what is in
use is the rate times how long a token's share of memory is held; and a step takes longer by about as much as is
resident. So the memory that one token per second holds, u / r, is linear in the utilization u:

    u / r = a + b u        from which        theta = limit / (a + b limit)

The line is fitted to observed windows. It needs no overload: what a half-empty instance does tells where it would be
full. Lateness lowers nothing, but where first tokens are late already, theta is not raised: something other than memory
binds there.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import EndpointGpu
from controlplane.policies.routing import is_usable

WINDOW_S = 300
_HOUR_S = 3600
_LEAST_UTILIZATION, _FULL = 0.05, 0.85
"""Between these a window says how memory follows the rate: below it is noise, above requests wait outside of it."""
_LATE_UNSTEADY = 0.5
"""With a larger share of first tokens late, what is in memory arrived before the window."""
_SPREAD = 1.2
"""So many times the rate of the lightest third of the windows is that of the busiest, or their line is not known."""
_REACH = 2.0
"""An estimate is at most so many times the rate that was seen in the busiest third."""
_NEAR = 0.8
"""Windows at this share of theta and more tell whether first tokens are late at it, and the busiest third at least."""


@dataclass(frozen=True, kw_only=True)
class LoadSums:
    """Sums over observations of single instances: how many there were, input tokens/s, utilizations, and how often an
    IW-F request would have begun later than its objective.
    """

    instances: int = 0
    tokens_per_s: float = 0.0
    utilization: float = 0.0
    late: float = 0.0

    def __add__(self, other: "LoadSums") -> "LoadSums":
        return LoadSums(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def window(self, start_s: float) -> "LoadWindow":
        """The means, of the window that begins at `start_s`; of at least one instance."""
        return LoadWindow(
            start_s=start_s,
            tokens_per_s=self.tokens_per_s / self.instances,
            utilization=self.utilization / self.instances,
            late=self.late / self.instances,
        )


@dataclass(frozen=True, kw_only=True)
class LoadWindow:
    """What one instance of a model on a GPU type did in `WINDOW_S` seconds, on average over those of a region: input
    tokens/s, effective memory utilization, and the share of moments at which a first token would have been late.
    """

    start_s: float
    tokens_per_s: float
    utilization: float
    late: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether what is in memory is what arrives."""
        return self.utilization <= _FULL and self.late <= _LATE_UNSTEADY


@dataclass(frozen=True, kw_only=True)
class ProfileFacts:
    """A profile, its correction in force, and what was observed.

    Attributes:
        tokens_per_s: theta as the profile states it.
        windows: of all regions, in any order.
        factor: on theta, now.
        moved_s: when the factor was last changed; None: never.
    """

    tokens_per_s: float
    windows: Sequence[LoadWindow]
    factor: float = 1.0
    moved_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How far and how fast a profile is corrected.

    Attributes:
        utilization: share of KV memory in use at which profiles state theta.
        factor_max: a factor is at most this, and at least its reciprocal.
        step: share by which a factor changes at most, at most once in `every_s`.
        band: an estimate that differs by this share or less changes nothing.
        memory_s: older windows are forgotten.
        windows_min, hours_min: without so many steady windows, in so many different hours, nothing is changed.
        late_max: with a larger share of late first tokens near theta, it is not raised.
    """

    utilization: float = 0.7
    factor_max: float = 2.0
    step: float = 0.15
    every_s: float = 3000.0
    band: float = 0.05
    memory_s: float = 86_400.0
    windows_min: int = 36
    hours_min: int = 3
    late_max: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a field is out of range.
        """
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization must be above 0 and at most 1, got {self.utilization}")
        if not 1 <= self.factor_max < math.inf:
            raise ValueError(f"factor_max must be at least 1, got {self.factor_max}")
        if not 0 <= self.band < self.step < 1:
            raise ValueError(f"need 0 <= band < step < 1, got {self.band} and {self.step}")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A factor on a profile's theta, and why it is this. `estimate`: theta by the observed windows; None: they do not
    tell. `windows`: how many steady ones there were. `moved_s`: a fact of the next call.
    """

    factor: float
    reason: str
    estimate: float | None = None
    windows: int = 0
    moved_s: float | None = None


def load_sums(
    instances: Iterable[PlacedInstance], *, ttft_s: Mapping[str, float], stale_s: float
) -> dict[EndpointGpu, LoadSums]:
    """What the ready instances with GPUs of their own do now, by endpoint and GPU type. `ttft_s`: IW-F's objective by
    model; `stale_s`: reports older than this tell nothing.
    """
    sums: defaultdict[EndpointGpu, LoadSums] = defaultdict(LoadSums)
    for each in instances:
        report = each.report
        if each.pooled or not (each.ready and each.serving) or report is None or not is_usable(report, stale_s):
            continue
        if report.input_tokens_per_s is None or report.kv_capacity_bytes <= 0:
            continue
        wait_s = report.prefill_urgent_wait_s or 0.0
        sums[each.key] += LoadSums(
            instances=1,
            tokens_per_s=max(0.0, report.input_tokens_per_s),
            utilization=min(1.0, max(0.0, report.kv_used_bytes / report.kv_capacity_bytes)),
            late=float(wait_s > ttft_s.get(report.endpoint.model, math.inf)),
        )
    return dict(sums)


def choose_correction(facts: ProfileFacts, now_s: float, settings: CorrectionSettings) -> Correction:
    """The factor for the coming hour: a limited step from the present one towards what was observed, within the bounds,
    or the present one with the reason why it stays.
    """
    recent = [window for window in facts.windows if 0 <= now_s - window.start_s <= settings.memory_s]
    steady = [w for w in recent if w.is_steady and w.utilization >= _LEAST_UTILIZATION and w.tokens_per_s > 0]
    full = [window for window in recent if not window.is_steady]
    theta = facts.tokens_per_s * facts.factor

    def stay(reason: str, estimate: float | None = None) -> Correction:
        return Correction(
            factor=facts.factor, reason=reason, estimate=estimate, windows=len(steady), moved_s=facts.moved_s
        )

    if facts.moved_s is not None and now_s - facts.moved_s < settings.every_s:
        return stay("it was changed less than an hour ago")
    if _is_evidence(full, settings) and len(full) > len(steady):
        estimate, seen = theta * (1 - settings.step), f"instances were full in {len(full)} of {len(recent)} windows"
    elif not _is_evidence(steady, settings):
        return stay(f"{len(steady)} windows under load in {_hours(steady)} hours are too few to tell")
    elif (fitted := theta_of(steady, settings.utilization)) is None:
        return stay(f"the load of {len(steady)} windows differs too little to tell")
    else:
        estimate = fitted
        seen = f"{len(steady)} windows in {_hours(steady)} hours reach {settings.utilization:.0%} of KV memory there"
    if abs(estimate / theta - 1) <= settings.band:
        return stay(f"observed {estimate:,.0f} tokens/s are within {settings.band:.0%}", estimate)
    if estimate > theta and (late := _late_near(recent, theta)) > settings.late_max:
        return stay(f"not raised to {estimate:,.0f} tokens/s: {late:.0%} of first tokens are late already", estimate)
    factor = moved(facts.factor, estimate / facts.tokens_per_s, settings)
    if factor == facts.factor:
        return stay(f"observed {estimate:,.0f} tokens/s, but a factor goes no further than {factor:.2f}", estimate)
    after = factor * facts.tokens_per_s
    part = "" if math.isclose(after, estimate, rel_tol=1e-3) else f", a step towards {estimate:,.0f}"
    return Correction(
        factor=factor,
        reason=f"{theta:,.0f} -> {after:,.0f} tokens/s{part}: {seen}",
        estimate=estimate,
        windows=len(steady),
        moved_s=now_s,
    )


def theta_of(windows: Sequence[LoadWindow], utilization: float) -> float | None:
    """The rate at which this utilization is reached, by the line through steady windows; None where their rates differ
    too little for a line.

    The line goes through the medians of the third with the lowest rates and of that with the highest, so that a few
    odd windows do not turn it. Thirds are by rate, which causes utilization and not the other way round: by utilization
    its noise alone would make a line.
    """
    ordered = sorted(windows, key=lambda window: window.tokens_per_s)
    third = len(ordered) // 3
    low, high = ordered[:third], ordered[-third:]
    if not third or _rate(high) < _SPREAD * _rate(low):
        return None
    rise = _utilization(high) - _utilization(low)
    slope = max(0.0, (_held(high) - _held(low)) / rise) if rise > 0 else 0.0
    held = median(each.utilization / each.tokens_per_s + slope * (utilization - each.utilization) for each in ordered)
    most = _REACH * _rate(high)
    return min(most, utilization / held) if held > 0 else most


def _rate(windows: Sequence[LoadWindow]) -> float:
    return median(window.tokens_per_s for window in windows)


def _utilization(windows: Sequence[LoadWindow]) -> float:
    return median(window.utilization for window in windows)


def _held(windows: Sequence[LoadWindow]) -> float:
    """The share of memory that one token per second holds."""
    return median(window.utilization / window.tokens_per_s for window in windows)


def _hours(windows: Iterable[LoadWindow]) -> int:
    return len({window.start_s // _HOUR_S for window in windows})


def _is_evidence(windows: Sequence[LoadWindow], settings: CorrectionSettings) -> bool:
    return len(windows) >= settings.windows_min and _hours(windows) >= settings.hours_min


def _late_near(windows: Sequence[LoadWindow], theta: float) -> float:
    """The share of late first tokens in windows near theta or above. Where none are, the busiest third stands for them:
    what is late at less is late at more.
    """
    ordered = sorted(windows, key=lambda window: -window.tokens_per_s)
    near = sum(window.tokens_per_s >= _NEAR * theta for window in ordered)
    return fmean(window.late for window in ordered[: max(near, len(ordered) // 3)])


def moved(factor: float, wanted: float, settings: CorrectionSettings) -> float:
    """The factor after one step towards the wanted one, within the bounds."""
    stepped = min(max(wanted, factor * (1 - settings.step)), factor * (1 + settings.step))
    return min(max(stepped, 1 / settings.factor_max), settings.factor_max)
