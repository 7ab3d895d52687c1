"""What a plan changes: cells and groups of them by filter, in pages, with totals. Postgres counts, since a plan of a
large fleet has tens of thousands of cells. A plan's cells never change, so a page is found by its offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Float, Label, Select, Subquery, and_, cast, func, literal, null, or_, select
from sqlalchemy.dialects.postgresql import JSONPATH
from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.store.plans import Plan, PlanEntry
from controlplane.store.tables import GpuType, Json, Profile

GroupBy = Literal["region", "model", "gpu_type", "constraint"]
_KEY = ("model", "region", "gpu_type")


@dataclass(frozen=True, kw_only=True)
class ChangeFilter:
    """Which cells. `words`: part of the model, the region or the reason. `exact`: values by column; None: any."""

    only_changes: bool
    words: str | None
    exact: Mapping[str, str | None]


def total_of(session: Session, plan_id: str, *, against: str | None, which: ChangeFilter) -> dict[str, Any]:
    """The sums over all cells that the filter selects, named as in `_sums`."""
    cells = _cells(plan_id, against)
    return dict(session.execute(select(*_sums(cells)).where(*_conditions(cells, which))).mappings().one())


def cost_of(session: Session, plan: Plan) -> float:
    """The price per hour of the GPUs that a plan gives to instances and pools, by the present profiles and prices;
    instances whose profile is gone are not in it.
    """
    cells = _cells(plan.id, None)
    cost: float | None = session.scalar(select(func.sum(cells.c.after * cells.c.price)))
    prices: dict[str, float] = dict(session.execute(select(GpuType.name, GpuType.cost_per_hour)).all())
    pooled: float = sum(pool["after"] * prices.get(pool["gpu_type"], 0.0) for pool in plan.pools)
    return (cost or 0.0) + pooled


def list_groups(
    session: Session, plan_id: str, *, against: str | None, which: ChangeFilter, by: GroupBy, offset: int, limit: int
) -> list[dict[str, Any]]:
    """The sums of each group, those that move the most GPUs first."""
    cells = _cells(plan_id, against)
    name = cells.c[by].label("name")
    moved = func.sum(func.abs(cells.c.after - cells.c.before) * func.greatest(cells.c.gpus, 1))
    query = select(name, *_sums(cells)).where(*_conditions(cells, which)).group_by(name).order_by(moved.desc(), name)
    return _rows(session, query, offset, limit)


def list_changes(
    session: Session, plan_id: str, *, against: str | None, which: ChangeFilter, offset: int, limit: int
) -> list[dict[str, Any]]:
    """Cells, those first that change by the most instances, then by name."""
    cells = _cells(plan_id, against)
    change = func.abs(cells.c.after - cells.c.before)
    names = (cells.c[name] for name in _KEY)
    query = select(cells).where(*_conditions(cells, which)).order_by(change.desc(), *names)
    return _rows(session, query, offset, limit)


def expected_of(session: Session, plan_id: str, endpoint: Endpoint) -> tuple[Json | None, list[float]]:
    """What a plan expects of an endpoint, from its stored inputs: the forecast's record (`ExpectedSeries.record`) with
    origin and quantile, None where it has none; and the tokens/s of each window of its hour that it was solved for.
    """
    names = func.jsonb_build_object("model", endpoint.model, "region", endpoint.region)

    def first_of(place: str) -> ColumnElement[Any]:
        path = cast(f"{place}[*] ? (@.model == $model && @.region == $region)", JSONPATH)
        return func.jsonb_path_query_first(Plan.inputs, path, names)

    forecasts = Plan.inputs["forecasts"]
    row = session.execute(
        select(
            first_of("$.forecasts.series"),
            forecasts["origin_s"],
            forecasts["quantile"],
            first_of("$.problem.demand"),
        ).where(Plan.id == plan_id)
    ).one()
    series, origin_s, quantile, windows = row
    expected = None if series is None else {**series, "origin_s": origin_s, "quantile": quantile}
    return expected, [] if windows is None else windows["tokens_per_s"]


def _cells(plan_id: str, against: str | None) -> Subquery:
    """The cells of a plan with their GPUs and prices. `against`: before is what this other plan placed."""
    entries = _entries(plan_id) if against is None else _compared(plan_id, against)
    profile = and_(Profile.model == entries.c.model, Profile.gpu_type == entries.c.gpu_type)
    return (
        select(entries, Profile.gpus, (Profile.gpus * GpuType.cost_per_hour).label("price"), Profile.tokens_per_s)
        .select_from(entries)
        .outerjoin(Profile, profile)
        .outerjoin(GpuType, GpuType.name == entries.c.gpu_type)
        .subquery("cells")
    )


def _entries(plan_id: str) -> Subquery:
    columns = [column for column in PlanEntry.__table__.columns if column.name != "plan_id"]
    return select(*columns).where(PlanEntry.plan_id == plan_id).subquery()


def _compared(plan_id: str, against: str) -> Subquery:
    """Cells of either plan. What not changing would cost is known against the fleet as it was, not against a plan."""
    new, old = _entries(plan_id), _entries(against)
    same = and_(*(new.c[name] == old.c[name] for name in _KEY))
    return (
        select(
            *(func.coalesce(new.c[name], old.c[name]).label(name) for name in _KEY),
            func.coalesce(old.c.after, 0).label("before"),
            func.coalesce(new.c.after, 0).label("after"),
            func.coalesce(new.c.reason, "not offered any more").label("reason"),
            func.coalesce(new.c.constraint, "none").label("constraint"),
            cast(null(), Float).label("cost_if_not"),
        )
        .select_from(new.join(old, same, full=True))
        .subquery()
    )


def _conditions(cells: Subquery, which: ChangeFilter) -> list[ColumnElement[bool]]:
    conditions = [cells.c[name] == value for name, value in which.exact.items() if value is not None]
    if which.only_changes:
        conditions.append(cells.c.before != cells.c.after)
    if which.words is not None:
        texts = (cells.c.model, cells.c.region, cells.c.reason)
        conditions.append(or_(*(text.icontains(which.words, autoescape=True) for text in texts)))
    return conditions


def _sums(cells: Subquery) -> list[Label[Any]]:
    """Of instances, GPUs and prices per hour. `unpriced`: cells with instances of a profile that is gone: their GPUs
    are not known.
    """
    change = cells.c.after - cells.c.before
    sums: dict[str, ColumnElement[Any]] = {
        "cells": func.count(),
        "changed": func.count().filter(change != 0),
        "instances_before": func.sum(cells.c.before),
        "instances_after": func.sum(cells.c.after),
        "started": func.sum(func.greatest(change, 0)),
        "stopped": func.sum(func.greatest(-change, 0)),
        "gpus_before": func.sum(cells.c.before * cells.c.gpus),
        "gpus_after": func.sum(cells.c.after * cells.c.gpus),
        "price_before": func.sum(cells.c.before * cells.c.price),
        "price_after": func.sum(cells.c.after * cells.c.price),
        "cost_if_not_max": func.max(cells.c.cost_if_not),
        "unpriced": func.count().filter(cells.c.price.is_(None), cells.c.before + cells.c.after > 0),
    }
    return [func.coalesce(value, literal(0)).label(name) for name, value in sums.items()]


def _rows(session: Session, query: Select[Any], offset: int, limit: int) -> list[dict[str, Any]]:
    return [dict(row) for row in session.execute(query.offset(offset).limit(limit)).mappings()]
