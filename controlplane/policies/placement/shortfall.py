"""The demand beyond an endpoint's own instances, and its sum over endpoints, in GPUs of a shared reserve.

The peak Y of the coming hour is taken as normal, Y ~ N(m, s), so what instances of capacity K do not serve,
X = max(0, Y - K), has with a = (m - K) / s closed forms (phi, Phi: the standard normal density and distribution):

    P(X > 0) = Phi(a)      E[X] = s (phi(a) + a Phi(a))      E[X^2] = s^2 ((a^2 + 1) Phi(a) + a phi(a))

A pool takes o(x) GPUs for x tokens/s of a model (`pools.occupancy_of`, and at least what an instance's rate says).
That is nearly concave, and 0 without demand, so its mean is about P(X > 0) o(E[X] / P(X > 0)). Sums take the variances
with one correlation r of all peaks; that of their shortfalls is never above it (Gebelein's maximal correlation of
normal variables):

    quantile of the sum  =  sum of means  +  z sqrt((1 - r) sum of variances + r (sum of deviations)^2)

and at most the sum of the endpoints' own quantiles, which is exact where they are perfectly correlated.

Worked: m = 1,500, s = 300, K = 1,500 tokens/s: a = 0, so E[X] = 0.3989 x 300 = 119.7 and E[X^2] = 45,000: a deviation
of 175.1 tokens/s. Four such models at r = 0: 478.7 + 1.2816 x 350.2 = 927.5 tokens/s for the 0.9 quantile of their sum,
where four own quantiles are 4 x 1.2816 x 300 = 1,537.9.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_ROUNDING = 1e-9
_NEVER = -6.0
"""So many deviations above the median nothing is beyond: the probability is 1e-9."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """X = max(0, Y - K): the probability that there is any, its mean and its standard deviation in tokens/s."""

    probability: float
    mean: float
    deviation: float


def shortfall_of(median: float, deviation: float, capacity: float) -> Shortfall:
    """The demand beyond `capacity`, of a peak that is normal with this median and standard deviation; in tokens/s."""
    if deviation <= 0:
        beyond = max(0.0, median - capacity)
        return Shortfall(float(beyond > 0), beyond, 0.0)
    a = (median - capacity) / deviation
    if a < _NEVER:
        return Shortfall(0.0, 0.0, 0.0)
    density, probability = _NORMAL.pdf(a), _NORMAL.cdf(a)
    mean = max(0.0, deviation * (density + a * probability))
    square = deviation**2 * ((a * a + 1) * probability + a * density)
    return Shortfall(probability, mean, math.sqrt(max(0.0, square - mean * mean)))


@dataclass(frozen=True, slots=True)
class ReserveLoad:
    """What a shortfall takes of a reserve, in GPUs: at most on average, its standard deviation, and alone at the
    quantile that is planned for.
    """

    mean: float
    deviation: float
    alone: float


class ReserveSum:
    """The sum of loads. `z`: the standard normal quantile that is planned for; `correlation`: of the peaks."""

    def __init__(self, z: float, correlation: float) -> None:
        self._z = z
        self._correlation = correlation
        self._mean = self._variance = self._deviation = self._alone = 0.0

    @property
    def alone(self) -> float:
        """The sum of the endpoints' own quantiles, in GPUs."""
        return max(0.0, self._alone)

    @property
    def gpus(self) -> float:
        """The quantile of the sum, in GPUs; at most `alone`."""
        variance = (1 - self._correlation) * self._variance + self._correlation * self._deviation**2
        return max(0.0, min(self._mean + self._z * math.sqrt(max(0.0, variance)), self._alone))

    def add(self, load: ReserveLoad, sign: int = 1) -> None:
        """Add a load, or with `sign` -1 take it away again."""
        self._mean += sign * load.mean
        self._variance += sign * load.deviation**2
        self._deviation += sign * load.deviation
        self._alone += sign * load.alone


def slots_for(gpus: float, slot_gpus: int, fill: float) -> int:
    """The fewest whole slots of which `gpus` are at most the share `fill`."""
    return max(0, math.ceil(gpus / (fill * slot_gpus) - _ROUNDING))


def quantile_z(quantile: float) -> float:
    """The standard normal quantile."""
    return _NORMAL.inv_cdf(quantile)
