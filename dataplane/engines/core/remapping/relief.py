"""The way out when KV has no room: the one that costs the requests of the slot the least time, by measured times. Pure.

Four ways, each with its cost in request-seconds: for how long requests wait for it, each for itself, together.

    remap      layers are given up. While nothing waits for their loads, it costs nothing; else every request that
               decodes waits for `remap_wait_s` in each step, for as long as the pressure lasts.
    swap       the victim's KV goes to host memory and comes back once there is room. Whoever asks waits for the way
               out, the victim until it is back; what of that it would not have run anyway does not count.
    recompute  the victim's KV is dropped, and computed anew once there is room: nobody else runs meanwhile.
    refuse     who asks waits until there is room. Only one that holds no KV yet can: it is not admitted now.

Pressure lasts for `room_s`: by what the requests of the slot still have to make, room comes by itself then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

Way = Literal["remap", "swap", "recompute", "refuse"]
WAYS: tuple[Way, ...] = ("remap", "refuse", "swap", "recompute")
"""In the order in which they are taken where they cost the same."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """Whose KV would leave. `kv_bytes` over the wire each way; `recompute_s`: estimate to prefill its tokens again.
    `idle_s`: for how long it would not run anyway (its model's next turn); `host_room`: host memory could take its KV.
    """

    kv_bytes: int
    recompute_s: float
    idle_s: float = 0.0
    host_room: bool = True


@dataclass(frozen=True, kw_only=True)
class ReliefFacts:
    """An allocation that failed. `remap_wait_s`: what a step would wait for loads if layers covered all of it, often 0;
    None: they cannot cover it. `victim`: None when nobody has to make way. `can_wait`: who asks holds no KV.

    `running`: requests that decode; `step_s`: of their step. `room_s`: until there is room by itself, inf if it never
    comes. `out_bytes_per_s`, `in_bytes_per_s`: measured; `wire_wait_s`: until a transfer out submitted now would begin.
    """

    remap_wait_s: float | None
    victim: Victim | None
    can_wait: bool
    running: int
    step_s: float
    room_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    wire_wait_s: float = 0.0

    def __post_init__(self) -> None:
        """Hold what is divided by."""
        assert self.step_s > 0, self.step_s
        assert self.room_s >= 0, self.room_s
        assert self.out_bytes_per_s > 0, self.out_bytes_per_s
        assert self.in_bytes_per_s > 0, self.in_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class ReliefSettings:
    """`forced`: the only way that is taken where it can be, to compare; None: the cheapest."""

    forced: Way | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown way.

        Raises:
            ValueError: `forced` is none of the four.
        """
        if self.forced is not None and self.forced not in WAYS:
            raise ValueError(f"forced must be one of {', '.join(WAYS)}, not {self.forced}")


@dataclass(frozen=True, kw_only=True)
class Relief:
    """`costs`: of each way that is open, in request-seconds."""

    way: Way
    costs: Mapping[Way, float]
    reason: str


def choose_relief(facts: ReliefFacts, settings: ReliefSettings) -> Relief | None:
    """The cheapest way that is open, or the forced one if it is; None when none is, and who asks must leave itself."""
    costs = predicted_costs(facts)
    if settings.forced is not None and settings.forced in costs:
        return Relief(way=settings.forced, costs=costs, reason="forced")
    if not costs:
        return None
    way = min(costs, key=lambda way: (costs[way], WAYS.index(way)))
    return Relief(way=way, costs=costs, reason=f"{costs[way]:.3f} request-seconds")


def predicted_costs(facts: ReliefFacts) -> dict[Way, float]:
    """Request-seconds of each way that is open."""
    costs: dict[Way, float] = {}
    if facts.remap_wait_s is not None:
        steps = facts.room_s / facts.step_s
        costs["remap"] = facts.running * facts.remap_wait_s * steps if facts.remap_wait_s else 0.0
    if facts.can_wait and facts.room_s < inf:
        costs["refuse"] = facts.room_s
    victim = facts.victim
    if victim is not None:
        if victim.host_room:
            out_s = facts.wire_wait_s + victim.kv_bytes / facts.out_bytes_per_s
            in_s = victim.kv_bytes / facts.in_bytes_per_s
            costs["swap"] = out_s + max(out_s + facts.room_s + in_s - victim.idle_s, 0.0)
        others = max(facts.running - 1, 0)
        costs["recompute"] = others * victim.recompute_s + max(facts.room_s - victim.idle_s, 0.0) + victim.recompute_s
    return costs
