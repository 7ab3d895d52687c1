"""How far the errors of several endpoints' forecasts go together, from the hours in which they are all known.

An error is what the peak of an hour was above the forecast's median, in standard deviations of that forecast, less the
mean of its endpoint. Of one correlation r of all pairs, the moments say, with the errors d of the endpoints of an hour
and each endpoint's root mean square s:

    r  =  sum over hours of ((sum of d)^2 - sum of d^2)  /  sum over hours of ((sum of s)^2 - sum of s^2)

So r is the correlation under which the sum of the errors would have varied as it did, which is what a reserve is sized
by, whatever the endpoints' errors are each. With equal s it is Fisher's intraclass correlation. It is drawn to a
setting, which counts as much as `SETTING_HOURS` hours, and lies between 0 and 1.

Worked: two endpoints with the errors (1, 1), (-1, -1), (1, -1), (-1, 1) have the sums 2, -2, 0, 0 and s = 1, so that
r = ((4 - 2) + (4 - 2) - 2 - 2) / (4 x (4 - 2)) = 0. Without the last two hours r = 4 / 4 = 1, and so with the second
endpoint's errors halved: ((2.25 - 1.25) x 2) / ((2.25 - 1.25) x 2).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean

from controlplane.policies.facts import Endpoint

PeakErrors = Mapping[Endpoint, Mapping[int, float]]
"""By endpoint and hour of the forecast (Unix time / 3600): (peak - median) in standard deviations of the forecast."""

NO_ERRORS: PeakErrors = {}

SETTING_HOURS = 48
"""The correlation of two independent series has a standard deviation of 1 / sqrt(48) = 0.14 over so many hours: the
setting counts as known no better. They are two days, since errors of one day are not independent of each other.
"""
ERRORS_S = 7 * 86_400
"""Errors of so long count, as those that forecasts themselves are calibrated by."""
_MOST = 4.0
"""An error counts as at most so many standard deviations, so that one hour is not all that counts."""


@dataclass(frozen=True, slots=True)
class ErrorCorrelation:
    """A correlation of forecast errors. `hours`: from which it was estimated; 0: it is the setting."""

    value: float
    hours: int = 0

    def __str__(self) -> str:
        """As plans say it."""
        return f"correlation {self.value:.2f} " + (f"from {self.hours} hours" if self.hours else "as set")


def peak_error(median: float, upper: float, actual: float, quantile: float) -> float | None:
    """The error of a forecast of a peak in its standard deviations, by the `quantile` that `upper` is; None where the
    forecast has no deviation.
    """
    deviation = (upper - median) / NormalDist().inv_cdf(quantile)
    return (actual - median) / deviation if deviation > 0 else None


def estimate_correlation(groups: Iterable[Iterable[Endpoint]], errors: PeakErrors, setting: float) -> ErrorCorrelation:
    """The correlation of the errors of any two endpoints of a group, over all groups.

    Args:
        groups: endpoints, such as those of a region, by group.
        errors: of past hours; an hour counts for the endpoints of which it is known.
        setting: the correlation where nothing is known.
    """
    together = apart = 0.0
    hours: set[int] = set()
    for group in groups:
        by_hour: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for endpoint in group:
            centred = _centred(errors.get(endpoint, {}))
            usual = sqrt(fmean(error**2 for error in centred.values())) if centred else 0.0
            for hour, error in centred.items():
                by_hour[hour].append((error, usual))
        for hour, known in by_hour.items():
            if len(known) > 1:
                together += _of_pairs(error for error, _ in known)
                apart += _of_pairs(usual for _, usual in known)
                hours.add(hour)
    if apart <= 0:
        return ErrorCorrelation(setting)
    count = len(hours)
    value = (SETTING_HOURS * setting + count * together / apart) / (SETTING_HOURS + count)
    return ErrorCorrelation(min(1.0, max(0.0, value)), count)


def _of_pairs(values: Iterable[float]) -> float:
    """The sum of products of all ordered pairs."""
    each = list(values)
    return sum(each) ** 2 - sum(value**2 for value in each)


def _centred(errors: Mapping[int, float]) -> dict[int, float]:
    """Errors of one endpoint less their mean, none of them too large."""
    if not errors:
        return {}
    cut = {hour: max(-_MOST, min(_MOST, error)) for hour, error in errors.items()}
    mean = fmean(cut.values())
    return {hour: error - mean for hour, error in cut.items()}
