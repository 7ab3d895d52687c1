"""State that changes by the second: load of endpoints, unplaced instances, and the backlog of batch requests."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import func, literal, select, true
from sqlalchemy.orm import Session

from controlplane.policies.facts import Backlog, Endpoint, InstanceFacts
from controlplane.policies.lifecycle import BatchState, shown_state
from controlplane.policies.routing import is_usable, utilization_of
from controlplane.store.batch_tables import Batch, BatchModel, QueuedRequest
from controlplane.store.fleet import heard_of
from controlplane.store.tables import Desired, EndpointRow, Instance, Node


def read_endpoints(session: Session, facts: tuple[InstanceFacts, ...], *, stale_s: float) -> list[dict[str, Any]]:
    """All endpoints by model and region; `facts` are the live view's instances.

    `instances` are the live ones by shown state. `utilization` (SageServe 6.1) and `remaining_tokens` are over those
    that take requests and reported within `stale_s` seconds, `load` is that of their busiest node; None without any.
    """
    states = count_instances(session, alive_s=stale_s)
    usable: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in facts:
        if is_usable(instance, stale_s):
            usable.setdefault(instance.endpoint, []).append(instance)
    rows = session.execute(select(EndpointRow.model, EndpointRow.region))
    known = {Endpoint(model=model, region=region) for model, region in rows} | states.keys()
    return [_summary(each, states.get(each, Counter()), usable.get(each, [])) for each in sorted(known)]


def count_instances(
    session: Session, *, alive_s: float, models: Collection[str] | None = None
) -> dict[Endpoint, Counter[str]]:
    """The live instances of every endpoint by shown state, or of some models; a node is alive if it sent a heartbeat in
    the last `alive_s` seconds.
    """
    states: dict[Endpoint, Counter[str]] = {}
    rows = session.execute(
        select(Instance.model, Instance.region, Instance.observed, heard_of(alive_s).label("alive"), func.count())
        .join(Node, Node.name == Instance.node)
        .where(Instance.desired != Desired.STOPPED, true() if models is None else Instance.model.in_(models))
        .group_by(Instance.model, Instance.region, Instance.observed, "alive")
    )
    for model, region, observed, alive, count in rows:
        state = shown_state(observed, node_alive=alive)
        states.setdefault(Endpoint(model=model, region=region), Counter())[state] += count
    return states


def read_unplaced(session: Session, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Instances that the last run of scaling could not place, by model and region: `model`, `region`, `gpu_type` (None:
    any), `count` and `reason`. `limit`: of the endpoints with some.
    """
    rows = session.execute(
        select(EndpointRow.model, EndpointRow.region, EndpointRow.unplaced)
        .where(EndpointRow.unplaced.is_not(None))
        .order_by(EndpointRow.model, EndpointRow.region)
        .limit(limit)
    )
    return [{"model": model, "region": region, **each} for model, region, unplaced in rows for each in unplaced or ()]


def count_unplaced(session: Session) -> int:
    """How many endpoints have instances without a place."""
    return session.scalar(select(func.count()).where(EndpointRow.unplaced.is_not(None))) or 0


def note_outcome(
    session: Session,
    *,
    settled: Mapping[Endpoint, Mapping[str, int] | None],
    unplaced: Mapping[Endpoint, list[dict[str, Any]]],
) -> None:
    """Store the outcome of a run of scaling: what each endpoint is settled at, and its unplaced instances, as
    `gpu_type`, `count` and `reason`. Unchanged rows are not written.
    """
    for row in session.scalars(select(EndpointRow)):
        endpoint = Endpoint(model=row.model, region=row.region)
        counts = settled.get(endpoint)
        row.settled = None if counts is None else dict(counts)
        row.unplaced = unplaced.get(endpoint)


def _summary(endpoint: Endpoint, states: Counter[str], usable: list[InstanceFacts]) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "region": endpoint.region,
        "instances": dict(states),
        "utilization": utilization_of(usable) if usable else None,
        "remaining_tokens": sum(each.remaining_tokens + each.sent_tokens for each in usable) if usable else None,
        "load": max(each.load for each in usable) if usable else None,
    }


def backlogs(session: Session, *, count_max: int | None = None) -> dict[str, Backlog]:
    """The waiting requests of each model, of each batch at most `count_max`; a request counts as the mean of its batch
    and model.
    """
    some = (
        select(literal(1))
        .where(
            QueuedRequest.batch_number == BatchModel.batch_number,
            QueuedRequest.model == BatchModel.model,
            QueuedRequest.lease_until.is_(None),
        )
        .limit(count_max)
        .correlate(BatchModel)
        .subquery()
    )
    counted = select(func.count().label("waiting")).select_from(some).lateral()
    rows = session.execute(
        select(
            BatchModel.model,
            func.sum(counted.c.waiting * BatchModel.tokens / BatchModel.requests),
            func.extract("epoch", func.min(Batch.deadline_at)),
            func.max(counted.c.waiting),
        )
        .join(Batch, Batch.number == BatchModel.batch_number)
        .join(counted, counted.c.waiting > 0)
        .where(Batch.state == BatchState.IN_PROGRESS, Batch.ended_at.is_(None))
        .group_by(BatchModel.model)
    )
    return {
        model: Backlog(tokens=float(tokens), due_s=float(due_s), at_least=most == count_max)
        for model, tokens, due_s, most in rows
    }
