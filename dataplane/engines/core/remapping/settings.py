"""The settings of remapping."""

from dataclasses import dataclass
from typing import Literal

from dataplane.engines.core.remapping.circle import FRAMES_MAX

Victims = Literal["mru", "lru"]
"""Whose layers are offloaded first among inactive models of equal priority: the most or the least recently used."""


@dataclass(frozen=True, kw_only=True)
class RemapSettings:
    """`margin`: loads must be hidden even if each takes this share longer than measured. `share_max`: of a model's
    layers that may be offloaded, whatever could be hidden. `frames_min`, `frames_max`: 1, 1 is m = alpha + 1 always, 2,
    2 is m = alpha + 2 always. `capped` False: offload layers whether or not their loads are hidden, and lend the place
    of the next model wherever KV is short (to compare). `reverts` False: offloaded layers stay so. `spare_layers`,
    `settle_s`: a layer is reclaimed when this many more of its size would still be free, and so long after the last one
    was offloaded.
    """

    margin: float = 0.1
    share_max: float = 0.9
    frames_min: int = 1
    frames_max: int = FRAMES_MAX
    victims: Victims = "mru"
    capped: bool = True
    reverts: bool = True
    spare_layers: float = 1.0
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a setting is out of range; the message names it.
        """
        if not self.margin >= 0:
            raise ValueError(f"margin must be at least 0, not {self.margin}")
        if not 0 <= self.share_max <= 1:
            raise ValueError(f"share_max must be between 0 and 1, not {self.share_max}")
        if not 1 <= self.frames_min <= self.frames_max <= FRAMES_MAX:
            raise ValueError(
                f"frames_min and frames_max must be between 1 and {FRAMES_MAX} and in order, "
                f"not {self.frames_min} and {self.frames_max}"
            )
        if not self.spare_layers >= 0:
            raise ValueError(f"spare_layers must be at least 0, not {self.spare_layers}")
        if not self.settle_s >= 0:
            raise ValueError(f"settle_s must be at least 0, not {self.settle_s}")
