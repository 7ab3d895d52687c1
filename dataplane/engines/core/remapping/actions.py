"""Handling KV pressure: the action that costs the requests of the slot the least time, by measured times. Pure.

The cost of an action is in request-seconds: the sum over requests of the time for which each waits because of it.

    remap      Weight layers are offloaded. This costs nothing while their loads are hidden; else every decoding
               request waits for `remap_wait_s` in each step, for as long as the pressure lasts.
    swap       The victim's KV is swapped to host memory, and back once there is memory. The requester waits for the
               transfer out, the victim until its KV is back; time in which it would not have run anyway is free.
    recompute  The victim's KV is dropped and prefilled again once there is memory; no other request runs meanwhile.
    refuse     The requester waits until there is memory. Only a request without KV can: it is not admitted yet.

The pressure lasts for `frees_in_s`, after which requests that complete have freed memory.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

Action = Literal["remap", "swap", "recompute", "refuse"]
ACTIONS: tuple[Action, ...] = ("remap", "refuse", "swap", "recompute")
"""In the order of preference where costs are equal."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The sequence to preempt. `kv_bytes` cross the host link each way; `recompute_s`: estimate to prefill its tokens
    again. `idle_s`: time until its model's next turn, in which it would not run anyway; `fits_host`: host memory has
    room for its KV.
    """

    kv_bytes: int
    recompute_s: float
    idle_s: float = 0.0
    fits_host: bool = True


@dataclass(frozen=True, kw_only=True)
class PressureFacts:
    """A failed allocation. `remap_wait_s`: seconds that a step would wait for loads if weight layers covered all of it,
    often 0; None if they cannot. `victim`: None if there is none to preempt. `can_wait`: the requester has no KV.

    `running`: requests that decode; `step_s`: their step time. `frees_in_s`: seconds until completing requests free
    memory, inf if none will. `out_bytes_per_s`, `in_bytes_per_s`: measured rates; `link_wait_s`: seconds until a
    transfer out that is submitted now would begin.
    """

    remap_wait_s: float | None
    victim: Victim | None
    can_wait: bool
    running: int
    step_s: float
    frees_in_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    link_wait_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.step_s > 0, self.step_s
        assert self.frees_in_s >= 0, self.frees_in_s
        assert self.out_bytes_per_s > 0, self.out_bytes_per_s
        assert self.in_bytes_per_s > 0, self.in_bytes_per_s


def choose_action(facts: PressureFacts, forced: Action | None = None) -> Action | None:
    """The cheapest possible action, or `forced` if that is possible. None if none is: the requester is preempted."""
    costs = predicted_costs(facts)
    if forced is not None and forced in costs:
        return forced
    return min(costs, key=lambda action: (costs[action], ACTIONS.index(action)), default=None)


def predicted_costs(facts: PressureFacts) -> dict[Action, float]:
    """Request-seconds of each possible action."""
    costs: dict[Action, float] = {}
    if facts.remap_wait_s is not None:
        steps = facts.frees_in_s / facts.step_s
        costs["remap"] = facts.running * facts.remap_wait_s * steps if facts.remap_wait_s else 0.0
    if facts.can_wait and facts.frees_in_s < inf:
        costs["refuse"] = facts.frees_in_s
    victim = facts.victim
    if victim is not None:
        if victim.fits_host:
            out_s = facts.link_wait_s + victim.kv_bytes / facts.out_bytes_per_s
            in_s = victim.kv_bytes / facts.in_bytes_per_s
            costs["swap"] = out_s + max(out_s + facts.frees_in_s + in_s - victim.idle_s, 0.0)
        recompute_s, others = victim.recompute_s, max(facts.running - 1, 0)
        costs["recompute"] = others * recompute_s + max(facts.frees_in_s - victim.idle_s, 0.0) + recompute_s
    return costs
