"""Node failures at given times, or at a rate with exponential intervals from the run's seed."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.simulator.kernel.events import Kind
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.world import World

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Nodes that fail at `at_s`, or each at `rate_per_day`, for `down_s`; detected after `noticed_s`."""

    nodes: tuple[str, ...]
    down_s: float
    noticed_s: float
    at_s: float | None = None
    rate_per_day: float = 0.0


class Failures:
    """Schedules failures in simulated time."""

    def __init__(self, world: World, fleet: Fleet, seed: int) -> None:
        self._world = world
        self._fleet = fleet
        self._rng = np.random.default_rng([seed, 0xFA11])

    def begin(self, failures: Iterable[Failure], begins_s: float) -> None:
        """Schedule all failures."""
        for failure in failures:
            for node in failure.nodes:
                if failure.at_s is None:
                    self._next(failure, node, begins_s)
                else:
                    self._at(failure.at_s, partial(self._fail, failure, node))

    def _next(self, failure: Failure, node: str, from_s: float) -> None:
        at_s = from_s + float(self._rng.exponential(DAY_S / failure.rate_per_day))
        self._at(at_s, partial(self._fail, failure, node))

    def _fail(self, failure: Failure, node: str) -> None:
        """Fail a node; one that is down already recovers as scheduled before."""
        now_s = self._world.events.now_s
        if node not in self._fleet.down:
            for served in self._fleet.fail(node):
                self._world.begin_anew(served)
            if failure.noticed_s < failure.down_s:
                self._at(now_s + failure.noticed_s, partial(self._fleet.forget, node))
            self._at(now_s + failure.down_s, partial(self._fleet.recover, node))
        if failure.at_s is None:
            self._next(failure, node, now_s + failure.down_s)

    def _at(self, at_s: float, action: partial[None]) -> None:
        self._world.events.at(at_s, Kind.END, action)
