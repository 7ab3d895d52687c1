"""The order of the waiting requests of a slot: FCFS, EDF, PF or DPA (SageServe 6.5), batch requests last.

An NIW request has priority 1 and comes after all of priority 0, whatever the order. At the age of `niw_aged_s` it
counts as an IW-N request that arrived at that moment.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from dataplane.protocol.tiers import IW_N, NIW, Tier
from dataplane.scheduling.tiers import TIER_OBJECTIVES, TIER_RANKS

Order = Literal["fcfs", "edf", "pf", "dpa"]
OrderKey = tuple[int, int, float]
"""Priority, class within it, then a time: the smaller goes first."""


class Waiting(Protocol):
    """A request that waits for its prefill."""

    @property
    def tier(self) -> Tier: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival until its first token is due."""


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """DPA: `urgent_s` is the paper's tau_p (at most this much time left), `severely_expired_s` its tau_n (late by
    more).
    """

    order: Order = "edf"
    urgent_s: float = 0.5
    severely_expired_s: float = 10.0
    niw_aged_s: float = 36_000.0


def order_key(request: Waiting, now_s: float, settings: OrderSettings) -> OrderKey:
    """The sort key. Requests of equal keys keep their order."""
    tier, arrived_s, ttft_s = request.tier, request.arrived_s, request.ttft_s
    if tier == NIW:
        if now_s - arrived_s < settings.niw_aged_s:
            return 1, 0, arrived_s
        tier, arrived_s, ttft_s = IW_N, arrived_s + settings.niw_aged_s, TIER_OBJECTIVES[IW_N].ttft_s
    deadline_s = arrived_s + ttft_s
    match settings.order:
        case "fcfs":
            return 0, 0, arrived_s
        case "edf":
            return 0, 0, deadline_s
        case "pf":
            return 0, TIER_RANKS[tier], arrived_s
        case "dpa":
            return 0, _dpa_class(deadline_s - now_s, TIER_RANKS[tier], settings), deadline_s


def _dpa_class(left_s: float, rank: int, settings: OrderSettings) -> int:
    """0 severely expired; 1, 2 urgent IW-F, IW-N; 3, 4 other IW-F, IW-N; 5 recently expired."""
    if left_s < -settings.severely_expired_s:
        return 0
    if left_s < 0:
        return 5
    return (1 if left_s <= settings.urgent_s else 3) + rank
