"""A plan for review: its totals, its changes by filter and in groups, and what it expects of one endpoint."""

from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import PlanPath
from controlplane.api.admin.plans import LayoutChange, PlanView, layout_changes
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.declarations import GpuTypeName, ModelName, RegionName
from controlplane.policies.facts import Endpoint
from controlplane.policies.placement.decision import Constraint
from controlplane.store import plan_changes
from controlplane.store.plan_changes import ChangeFilter, GroupBy
from controlplane.store.plans import Plan, get_plan

RowT = TypeVar("RowT", bound=BaseModel)
router = APIRouter(tags=["admin: plans"])
ROWS_MAX = 1000
OFFSET_MAX = 10_000_000
_TEXT = r"^[^\x00]*$"
SHORTFALLS_MAX = 200
POOL_MODELS_MAX = 50


class Totals(BaseModel):
    """Sums over cells. GPUs and prices are by the present profiles and GPU types, per hour."""

    cells: int
    changed: int
    instances_before: int
    instances_after: int
    started: int = Field(description="instances that are more, over the cells that grow")
    stopped: int
    gpus_before: int
    gpus_after: int
    price_before: float
    price_after: float
    cost_if_not_max: float = Field(description="per hour, of the change that is the dearest not to make")
    unpriced: int = Field(description="cells with instances whose profile is gone: not in the sums of GPUs and prices")


class Group(Totals):
    """Sums over the cells of a region, model, GPU type or constraint."""

    name: str


class Change(BaseModel):
    """One cell. `constraint` is what makes the count necessary."""

    model: str
    region: str
    gpu_type: str
    before: int
    after: int
    reason: str
    constraint: str = Field(examples=["home"])
    cost_if_not: float | None = Field(description="per hour; 0 where nothing changes, null against another plan")
    gpus: int | None = Field(description="of one instance; null: its profile is gone")
    price: float | None = Field(description="of one instance, per hour")
    tokens_per_s: float | None = Field(description="of one instance at its objectives")


class ReserveChange(BaseModel):
    """The GPUs of a pool that are the reserve of endpoints with instances of their own."""

    gpus: int
    missing_gpus: int = Field(description="that it should have more, without capacity for them")
    endpoints: int = Field(description="that it holds")
    reason: str


class PoolChange(BaseModel):
    """The GPUs of a pool before and after."""

    region: str
    gpu_type: str
    worker_gpus: int | None = Field(
        None, description="GPUs of each worker of its slots, which each of its models takes; null: an older plan"
    )
    before: int
    after: int
    endpoints: int = Field(description="that the pool serves")
    joined: list[str] = Field(description=f"models that were not pooled there before, at most {POOL_MODELS_MAX}")
    reserve: ReserveChange | None = Field(None, description="null: it is none")


class Shortfall(BaseModel):
    """Demand that is not served, or an endpoint below its minimum or pin (0 tokens/s)."""

    model: str
    region: str | None = Field(description="null: no region serves it; else it is not served there, at home")
    tokens_per_s: float
    reason: str


class PlanSummary(BaseModel):
    """A plan without its cells."""

    plan: PlanView
    index: int = Field(description="send this when applying")
    totals: Totals
    pools: list[PoolChange]
    layouts: list[LayoutChange] = Field(description="nodes whose GPUs it groups into other slots")
    unserved_tokens_per_s: float = Field(description="served by no region")
    away_tokens_per_s: float = Field(description="not served in its own region, as the settings want it")
    shortfalls: int
    largest_shortfalls: list[Shortfall] = Field(description=f"at most {SHORTFALLS_MAX}, the largest first")


class Some(BaseModel, Generic[RowT]):
    """A page of rows. `next` goes into `after` while `has_more`."""

    data: list[RowT]
    has_more: bool
    next: int | None


class Groups(Some[Group]):
    """Some groups of a plan's cells."""


class Changes(Some[Change]):
    """Some cells of a plan."""

    totals: Totals = Field(description="of all cells that the filter selects")


class Expected(BaseModel):
    """The forecast that a plan took for an endpoint, tokens per second."""

    origin_s: int
    quantile: float
    forecaster: str
    peak_q50: float
    peak_upper: float
    stand_in: str | None = Field(description="why this is no forecast from the plan's origin; null: it is")


class PlanEndpoint(BaseModel):
    """What a plan expects of an endpoint in its hour, and what it places for it."""

    window_start_s: int
    expected: Expected | None = Field(description="null: the plan had none")
    demand: list[float] = Field(description="tokens/s planned for, in windows of one length; deferred demand included")
    cells: list[Change]


def _filter(
    only_changes: Annotated[bool, Query(description="leave out cells that stay as they are")] = True,
    model: Annotated[ModelName | None, Query()] = None,
    region: Annotated[RegionName | None, Query()] = None,
    gpu_type: Annotated[GpuTypeName | None, Query()] = None,
    constraint: Constraint | None = None,
    words: Annotated[
        str | None, Query(max_length=200, pattern=_TEXT, description="part of the model, the region or the reason")
    ] = None,
) -> ChangeFilter:
    exact = {"model": model, "region": region, "gpu_type": gpu_type, "constraint": constraint}
    return ChangeFilter(only_changes=only_changes, words=words, exact=exact)


Which = Annotated[ChangeFilter, Depends(_filter)]
Against = Annotated[
    str | None, Query(max_length=64, pattern=_TEXT, description="compare with this plan's counts, not with the fleet's")
]
Rows = Annotated[int, Query(ge=1, le=ROWS_MAX, description="rows of a page")]
Offset = Annotated[int, Query(ge=0, le=OFFSET_MAX, description="`next` of the page before; 0: the first page")]


@router.get("/plans/{plan_id}/summary", summary="A plan's totals")
def get_summary(plan_id: PlanPath, session: SessionDep, _: Viewer, against: Against = None) -> PlanSummary:
    """What it costs, moves and cannot serve; its size does not grow with the number of cells."""
    plan = _check(session, plan_id, against)
    everything = ChangeFilter(only_changes=False, words=None, exact={})
    lacking = sorted(plan.unserved, key=lambda each: -each["tokens_per_s"])
    return PlanSummary(
        plan=PlanView.model_validate(plan),
        index=plan.fleet_index,
        totals=_totals(session, plan_id, against, everything),
        pools=[_pool(each) for each in plan.pools],
        layouts=layout_changes(plan),
        unserved_tokens_per_s=sum(each["tokens_per_s"] for each in lacking if each["region"] is None),
        away_tokens_per_s=sum(each["tokens_per_s"] for each in lacking if each["region"] is not None),
        shortfalls=len(lacking),
        largest_shortfalls=[Shortfall.model_validate(each) for each in lacking[:SHORTFALLS_MAX]],
    )


@router.get("/plans/{plan_id}/changes", summary="A plan's changes")
def list_changes(
    plan_id: PlanPath,
    session: SessionDep,
    _: Viewer,
    which: Which,
    against: Against = None,
    limit: Rows = 100,
    after: Offset = 0,
) -> Changes:
    """Cells by filter, those first that change the most, and the totals of all that the filter selects."""
    _check(session, plan_id, against)
    rows = plan_changes.list_changes(session, plan_id, against=against, which=which, offset=after, limit=limit + 1)
    return Changes(totals=_totals(session, plan_id, against, which), **_some(rows, limit, after))


@router.get("/plans/{plan_id}/groups", summary="A plan's changes in groups")
def list_groups(
    plan_id: PlanPath,
    session: SessionDep,
    _: Viewer,
    which: Which,
    by: GroupBy,
    against: Against = None,
    limit: Rows = 100,
    after: Offset = 0,
) -> Groups:
    """The filter's cells added up by region, model, GPU type or constraint; first what moves the most GPUs."""
    _check(session, plan_id, against)
    rows = plan_changes.list_groups(
        session, plan_id, against=against, which=which, by=by, offset=after, limit=limit + 1
    )
    return Groups(**_some(rows, limit, after))


@router.get("/plans/{plan_id}/endpoint", summary="What a plan expects of an endpoint")
def get_plan_endpoint(
    plan_id: PlanPath,
    session: SessionDep,
    _: Viewer,
    model: Annotated[ModelName, Query()],
    region: Annotated[RegionName, Query()],
) -> PlanEndpoint:
    """The forecast it took, the demand it was solved for, and its cells."""
    plan = get_plan(session, plan_id)
    expected, demand = plan_changes.expected_of(session, plan_id, Endpoint(model=model, region=region))
    which = ChangeFilter(only_changes=False, words=None, exact={"model": model, "region": region})
    cells = plan_changes.list_changes(session, plan_id, against=None, which=which, offset=0, limit=ROWS_MAX)
    return PlanEndpoint(
        window_start_s=plan.window_start_s,
        expected=None if expected is None else Expected.model_validate(expected),
        demand=demand,
        cells=[Change.model_validate(row) for row in cells],
    )


def _some(rows: list[dict[str, Any]], limit: int, offset: int) -> dict[str, Any]:
    """The fields of `Some`, of one row more than a page has."""
    more = len(rows) > limit
    return {"data": rows[:limit], "has_more": more, "next": offset + limit if more else None}


def _check(session: Session, plan_id: str, against: str | None) -> Plan:
    if against is not None:
        get_plan(session, against)
    return get_plan(session, plan_id)


def _totals(session: Session, plan_id: str, against: str | None, which: ChangeFilter) -> Totals:
    return Totals.model_validate(plan_changes.total_of(session, plan_id, against=against, which=which))


def _pool(pool: dict[str, Any]) -> PoolChange:
    joined = [each["model"] for each in pool["pooled"] if not each["before"]]
    size = {name: pool[name] for name in ("region", "gpu_type", "before", "after")}
    return PoolChange(
        **size,
        worker_gpus=pool.get("worker_gpus"),
        endpoints=len(pool["pooled"]),
        joined=joined[:POOL_MODELS_MAX],
        reserve=_reserve(pool.get("reserve")),
    )


def _reserve(reserve: dict[str, Any] | None) -> ReserveChange | None:
    if reserve is None:
        return None
    fields = {name: reserve[name] for name in ("gpus", "missing_gpus", "reason")}
    return ReserveChange(**fields, endpoints=len(reserve["held"]))
