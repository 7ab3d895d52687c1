"""Demand by minute, from which forecasts are made, as the live service measures it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from controlplane.policies.facts import Endpoint
from dataplane.protocol.tiers import NIW
from forecasts.series import DemandSeries
from ops.simulator.kernel.requests import Request

MINUTE_S = 60.0
OBSERVED_S = 300.0
"""What arrives now is the mean over so much."""
_Minutes = defaultdict[tuple[str, str], defaultdict[int, int]]
"""Tokens by model, region and minute."""


class Demand:
    """Input tokens by minute and endpoint: interactive ones at their origin, deferred ones where they were first
    sent. Each request counts once, those that are refused for lack of capacity included.

    Minutes are counted from 0 s; only whole ones are returned.
    """

    def __init__(self) -> None:
        self._interactive: _Minutes = defaultdict(_minutes)
        self._deferred: _Minutes = defaultdict(_minutes)

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Demand":
        """The demand of all interactive requests of a stream."""
        demand = cls()
        for request in requests:
            if request.tier != NIW:
                demand.count(request)
        return demand

    def count(self, request: Request) -> None:
        """Count an interactive request."""
        minute = int(request.arrived_s // MINUTE_S)
        self._interactive[request.model, request.origin][minute] += request.prompt_tokens

    def count_deferred(self, request: Request, region: str, now_s: float) -> None:
        """Count a deferred request that is sent to a region for the first time."""
        self._deferred[request.model, region][int(now_s // MINUTE_S)] += request.prompt_tokens

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Endpoints with any interactive request so far, ordered."""
        return tuple(Endpoint(model=model, region=region) for model, region in sorted(self._interactive))

    def series(self, endpoint: Endpoint, *, since_s: float, until_s: float) -> DemandSeries:
        """Interactive tokens/s by minute, between two whole minutes."""
        return DemandSeries(
            start_s=since_s, bucket_s=MINUTE_S, values=_rates(self._interactive, endpoint, since_s, until_s)
        )

    def mean(self, endpoint: Endpoint, *, since_s: float, until_s: float, deferred: bool = False) -> float:
        """Mean tokens/s over the minutes between; 0 without any."""
        of = self._deferred if deferred else self._interactive
        values = _rates(of, endpoint, since_s, until_s)
        return float(values.mean()) if len(values) else 0.0

    def observed(self, endpoint: Endpoint, now_s: float) -> float:
        """Present tokens/s, of the last whole minutes."""
        until_s = now_s // MINUTE_S * MINUTE_S
        return self.mean(endpoint, since_s=max(0.0, until_s - OBSERVED_S), until_s=until_s)


def _minutes() -> defaultdict[int, int]:
    return defaultdict(int)


def _rates(of: _Minutes, endpoint: Endpoint, since_s: float, until_s: float) -> npt.NDArray[np.float64]:
    """Tokens/s of each minute between."""
    minutes: Mapping[int, int] = of.get((endpoint.model, endpoint.region), {})
    span = range(round(since_s / MINUTE_S), round(until_s / MINUTE_S))
    return np.array([minutes.get(minute, 0) / MINUTE_S for minute in span], dtype=np.float64)
