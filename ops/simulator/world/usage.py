"""Instance seconds by use: counts of instances over time, integrated exactly."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from controlplane.policies.facts import Endpoint, PoolKey
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.results.results import State


class Use(NamedTuple):
    """How an instance is counted; or a slot of a pool, which belongs to no endpoint."""

    endpoint: Endpoint | PoolKey
    state: State
    kind: InstanceKind
    gpu_type: str
    gpus: int


class Usage:
    """Instance seconds by use, up to the present."""

    def __init__(self) -> None:
        self._counts: Counter[Use] = Counter()
        self._seconds: defaultdict[Use, float] = defaultdict(float)
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        """Discard everything before this moment."""
        self._seconds.clear()
        self._now_s = now_s

    def change(self, before: Use | None, after: Use | None, now_s: float) -> None:
        """Change what an instance is counted as; None: it does not exist."""
        self._advance(now_s)
        if before is not None:
            self._counts[before] -= 1
            assert self._counts[before] >= 0
        if after is not None:
            self._counts[after] += 1

    def seconds(self, now_s: float) -> Mapping[Use, float]:
        self._advance(now_s)
        return dict(self._seconds)

    def _advance(self, now_s: float) -> None:
        for use, count in self._counts.items():
            if count:
                self._seconds[use] += count * (now_s - self._now_s)
        self._now_s = now_s
