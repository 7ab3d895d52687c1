"""What came, minute by minute: the record that forecasts are made from, as the live service measures it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from controlplane.policies.facts import Endpoint
from forecasts.series import DemandSeries
from ops.simulator.requests import Request

MINUTE_S = 60.0
OBSERVED_S = 300.0
"""What arrives now is the mean over so much."""


class Demand:
    """Input tokens by minute and endpoint: interactive ones where they came from, deferred ones where they were sent.

    Minutes are counted from 0 s; only those that are over are told.
    """

    def __init__(self) -> None:
        self._interactive: dict[Endpoint, defaultdict[int, float]] = {}
        self._deferred: dict[Endpoint, defaultdict[int, float]] = {}

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Demand":
        """The whole record of the interactive requests of a stream."""
        demand = cls()
        for request in requests:
            if request.tier != "NIW":
                demand.count(request)
        return demand

    def count(self, request: Request) -> None:
        """An interactive request came."""
        self._add(self._interactive, Endpoint(model=request.model, region=request.origin), request, request.arrived_s)

    def count_deferred(self, request: Request, region: str, now_s: float) -> None:
        """A deferred request was sent to a region."""
        self._add(self._deferred, Endpoint(model=request.model, region=region), request, now_s)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Those from which interactive requests ever came, ordered."""
        return tuple(sorted(self._interactive))

    def series(self, endpoint: Endpoint, *, since_s: float, until_s: float) -> DemandSeries:
        """Interactive tokens/s by minute, from a minute's begin to another's."""
        return DemandSeries(
            start_s=since_s, bucket_s=MINUTE_S, values=self._rates(self._interactive, endpoint, since_s, until_s)
        )

    def mean(self, endpoint: Endpoint, *, since_s: float, until_s: float, deferred: bool = False) -> float:
        """Tokens/s over the minutes that lie between; 0 without any."""
        of = self._deferred if deferred else self._interactive
        values = self._rates(of, endpoint, since_s, until_s)
        return float(values.mean()) if len(values) else 0.0

    def observed(self, endpoint: Endpoint, now_s: float) -> float:
        """Tokens/s that arrive now, by the last whole minutes."""
        until_s = now_s // MINUTE_S * MINUTE_S
        return self.mean(endpoint, since_s=max(0.0, until_s - OBSERVED_S), until_s=until_s)

    def _rates(
        self, of: dict[Endpoint, defaultdict[int, float]], endpoint: Endpoint, since_s: float, until_s: float
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        minutes: Mapping[int, float] = of.get(endpoint, {})
        span = range(round(since_s / MINUTE_S), round(until_s / MINUTE_S))
        return np.array([minutes.get(minute, 0.0) / MINUTE_S for minute in span], dtype=np.float64)

    @staticmethod
    def _add(of: dict[Endpoint, defaultdict[int, float]], endpoint: Endpoint, request: Request, at_s: float) -> None:
        of.setdefault(endpoint, defaultdict(float))[int(at_s // MINUTE_S)] += request.prompt_tokens
