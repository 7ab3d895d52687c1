"""The network between regions: how long a request travels, and which regions it prefers."""

from collections.abc import Mapping, Sequence

from controlplane.policies.routing import choose_preference


class Network:
    """`latencies_ms`: one way, by origin and destination; what is not there, and within a region, takes no time."""

    def __init__(self, regions: Sequence[str], latencies_ms: Mapping[tuple[str, str], float]) -> None:
        self._regions = regions
        self._latencies_ms = latencies_ms
        self._preferences: dict[str, tuple[str, ...]] = {}

    def preference(self, origin: str) -> tuple[str, ...]:
        """The regions in the order that requests from `origin` prefer."""
        known = self._preferences.get(origin)
        if known is None:
            known = self._preferences[origin] = choose_preference(self._regions, origin, self._latencies_ms)
        return known

    def travel_s(self, origin: str, destination: str) -> float:
        if origin == destination:
            return 0.0
        return self._latencies_ms.get((origin, destination), 0.0) / 1000
