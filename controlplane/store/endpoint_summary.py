"""What moves from second to second: endpoints with their load, and what waits in the NIW queue."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint, InstanceFacts
from controlplane.policies.routing import is_usable, utilization_of
from controlplane.store.tables import Desired, EndpointRow, Instance


@dataclass(frozen=True, kw_only=True)
class EndpointSummary:
    """A model in a region. `instances` are the live ones by observed state. `utilization` (SageServe 6.1) and
    `remaining_tokens` are over those that take requests and were heard of lately, `load` is that of their busiest node;
    None where there are none.
    """

    model: str
    region: str
    instances: Mapping[str, int]
    utilization: float | None
    remaining_tokens: int | None
    load: float | None


def read_endpoints(
    session: Session, facts: tuple[InstanceFacts, ...], *, stale_s: float
) -> tuple[EndpointSummary, ...]:
    """All endpoints by model and region; `facts` are the live view's instances."""
    states: dict[Endpoint, Counter[str]] = {}
    counted = (
        select(Instance.model, Instance.region, Instance.observed, func.count())
        .where(Instance.desired != Desired.STOPPED)
        .group_by(Instance.model, Instance.region, Instance.observed)
    )
    for model, region, state, count in session.execute(counted):
        states.setdefault(Endpoint(model=model, region=region), Counter())[state] += count
    usable: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in facts:
        if is_usable(instance, stale_s):
            usable.setdefault(instance.endpoint, []).append(instance)
    rows = session.execute(select(EndpointRow.model, EndpointRow.region))
    known = {Endpoint(model=model, region=region) for model, region in rows} | states.keys()
    return tuple(
        _summary(endpoint, states.get(endpoint, Counter()), usable.get(endpoint, []))
        for endpoint in sorted(known, key=lambda endpoint: (endpoint.model, endpoint.region))
    )


def _summary(endpoint: Endpoint, states: Counter[str], usable: list[InstanceFacts]) -> EndpointSummary:
    return EndpointSummary(
        model=endpoint.model,
        region=endpoint.region,
        instances=dict(states),
        utilization=utilization_of(usable) if usable else None,
        remaining_tokens=sum(each.remaining_tokens + each.sent_tokens for each in usable) if usable else None,
        load=max(each.load for each in usable) if usable else None,
    )
