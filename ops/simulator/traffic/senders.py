"""What a recording leaves open about its requests: from where, for which model, of which tier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataplane.protocol.tiers import Tier
from ops.simulator.traffic.traffic import draw_names

NameArray = npt.NDArray[np.object_]


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Shares of models, of the regions that requests come from, and of tiers."""

    models: Mapping[str, float]
    origins: Mapping[str, float]
    tiers: Mapping[Tier, float]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NameArray, NameArray, NameArray]:
        """Models, origins and tiers of so many requests."""
        models, origins = draw_names(self.models, rng, count), draw_names(self.origins, rng, count)
        return models, origins, draw_names(self.tiers, rng, count)


class Names:
    """The scenario's models by the names of a recording: the same where there is one; others take them by turns."""

    def __init__(self, models: Sequence[str], *, keep: bool = False) -> None:
        self._models = models
        self._keep = keep
        self._given: dict[str, str] = {name: name for name in models}

    def __call__(self, recorded: str) -> str:
        """A model of the scenario, or the recorded name if names are kept."""
        if self._keep:
            return recorded
        if recorded not in self._given:
            self._given[recorded] = self._models[(len(self._given) - len(self._models)) % len(self._models)]
        return self._given[recorded]


def alike(names: Sequence[str]) -> dict[str, float]:
    """Equal shares."""
    return dict.fromkeys(names, 1.0)
