"""Admission: an interactive request needs an instance that can begin it in time, a flex request spare capacity.

Under overload, refusing some requests keeps the objective for the others. Unknown waits refuse nobody: without fresh
reports, or before a node has measured its prefill pace, requests are admitted, up to the nodes' own queue limits.
"""

import math
from dataclasses import dataclass, field

from controlplane.policies.decisions import Admit, NoRoute, Refuse, Wait
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.routing import RoutingSettings, choose_route, predicted_wait_s, takers
from dataplane.protocol.tiers import Tier

_RETRY_MAX_S = 60


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """Multiples of the TTFT objective at which a tier is refused; IW-F is admitted longer. `flex_below`: utilization
    below which there is spare capacity for a flex request.
    """

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    iw_f_margin: float = 1.2
    iw_n_margin: float = 0.8
    flex_below: float = 0.6


def choose_admission(facts: RoutingFacts, now_s: float, settings: AdmissionSettings) -> Admit | Refuse | Wait:
    """Admit the request, refuse it for some seconds, or (flex) queue it."""
    if facts.tier == Tier.NIW:
        route = choose_route(facts, now_s, settings.routing)
        full = not isinstance(route, NoRoute) and route.utilization >= settings.flex_below
        return Wait() if full else Admit()
    wait_s, limit_s = shortest_wait_s(facts, settings.routing), _limit_s(facts, settings)
    if wait_s is None or limit_s is None or wait_s <= limit_s:
        return Admit()
    return Refuse(
        reason=f"a request of tier {facts.tier.value} would wait {wait_s:.1f} s before it begins;"
        f" the limit is {limit_s:.1f} s",
        retry_after_s=max(1, min(math.ceil(wait_s - limit_s), _RETRY_MAX_S)),
    )


def shortest_wait_s(facts: RoutingFacts, settings: RoutingSettings) -> float | None:
    """The shortest predicted wait among the instances that routing may choose; None if there are none, or one of their
    waits is unknown.
    """
    waits = [predicted_wait_s(instance, facts.tier) for instance in takers(facts, settings.stale_s)]
    known = [wait_s for wait_s in waits if wait_s is not None]
    return min(known) if known and len(known) == len(waits) else None


def _limit_s(facts: RoutingFacts, settings: AdmissionSettings) -> float | None:
    if facts.ttft_s is None:
        return None
    margin = settings.iw_f_margin if facts.tier == Tier.IW_F else settings.iw_n_margin
    return margin * facts.ttft_s
