"""Models with what there is of each over its regions."""

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import shown_state
from controlplane.store.fleet import heard_of
from controlplane.store.rows import Page, page
from controlplane.store.tables import Desired, EndpointRow, Instance, Model, Node


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A model. `base`: the one to which it is a LoRA adapter; `with_base`: whose instances serve it. `endpoints`:
    regions that offer it; `unplaced`: those of them where instances have no place.
    """

    name: str
    task: str
    engine: str
    weights_bytes: int
    context_tokens: int
    base: str | None
    with_base: bool
    endpoints: int
    instances: dict[str, int]
    unplaced: int


@dataclass(frozen=True, kw_only=True)
class SummaryPage:
    """A page of them."""

    rows: list[SummaryRow]
    next: str | None
    has_more: bool


def list_summaries(
    session: Session,
    *,
    words: str,
    region: str | None,
    state: str | None,
    base: str | None = None,
    alive_s: float,
    after: str | None,
    limit: int,
) -> SummaryPage:
    """Models by name that contain `words`; with `region`, those that it offers, and what there is of them there.
    `state`: those with an instance that its node last said to be so; "unplaced": with one that has no place; "none":
    without any. `base`: the LoRA adapters of that model.
    """
    query = select(Model)
    if base is not None:
        query = query.where(Model.base == base)
    if words:
        query = query.where(Model.name.icontains(words, autoescape=True))
    offered = and_(EndpointRow.model == Model.name, *([EndpointRow.region == region] if region else []))
    live = and_(
        Instance.model == Model.name,
        Instance.desired != Desired.STOPPED,
        *([Instance.region == region] if region else []),
    )
    if region:
        query = query.where(exists().where(offered))
    if state == "unplaced":
        query = query.where(exists().where(offered, EndpointRow.unplaced.is_not(None)))
    elif state == "none":
        query = query.where(~exists().where(live))
    elif state is not None:
        query = query.where(exists().where(live, Instance.observed == state))
    found: Page[Model] = page(session, query, after=after, limit=limit)
    names = [model.name for model in found.rows]
    offers = _offers(session, names, region)
    instances = _instances(session, names, region, alive_s=alive_s)
    rows = [
        SummaryRow(
            name=model.name,
            task=model.task,
            engine=model.engine,
            weights_bytes=model.weights_bytes,
            context_tokens=model.context_tokens,
            base=model.base,
            with_base=model.with_base,
            endpoints=offers.get(model.name, (0, 0))[0],
            unplaced=offers.get(model.name, (0, 0))[1],
            instances=dict(instances.get(model.name, {})),
        )
        for model in found.rows
    ]
    return SummaryPage(rows=rows, next=found.next, has_more=found.has_more)


def _offers(session: Session, models: list[str], region: str | None) -> dict[str, tuple[int, int]]:
    """By model, its endpoints, and those with instances that have no place."""
    query = select(EndpointRow.model, func.count(), func.count(EndpointRow.unplaced)).group_by(EndpointRow.model)
    if region:
        query = query.where(EndpointRow.region == region)
    rows = session.execute(query.where(EndpointRow.model.in_(models)))
    return {model: (count, unplaced) for model, count, unplaced in rows}


def _instances(session: Session, models: list[str], region: str | None, *, alive_s: float) -> dict[str, Counter[str]]:
    """By model, its live instances by shown state."""
    query = (
        select(Instance.model, Instance.observed, heard_of(alive_s).label("alive"), func.count())
        .join(Node, Node.name == Instance.node)
        .where(Instance.desired != Desired.STOPPED, Instance.model.in_(models))
        .group_by(Instance.model, Instance.observed, "alive")
    )
    if region:
        query = query.where(Instance.region == region)
    counts: dict[str, Counter[str]] = {}
    for model, observed, alive, count in session.execute(query):
        counts.setdefault(model, Counter())[shown_state(observed, node_alive=alive)] += count
    return counts
