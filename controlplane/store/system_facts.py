"""What metrics say of the whole system: counts that are cheap to read at every scrape, whatever the fleet's size."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import false, func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import PlanState
from controlplane.policies.plan_explanations import ForecastRecord
from controlplane.store.batch_ends import read_progress, read_risk
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.demand import read_scores
from controlplane.store.endpoint_summary import count_instances, read_unplaced
from controlplane.store.fleet import heard_of, node_state
from controlplane.store.latency_comparisons import LatencyComparisonRow, comparisons
from controlplane.store.plan_changes import cost_of
from controlplane.store.plans import SCHEDULE, Plan, plan_in_force
from controlplane.store.session import server_time_s
from controlplane.store.tables import Desired, Instance, Node, Slot

_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """The batch queue. By model: `open`: requests without a result; `finished`: completed ones since ever. `running`:
    requests that a dispatcher holds; `at_risk`: batches that are predicted to miss their deadline, by at most `late_s`
    seconds; `batches`: those that have not ended, by state.
    """

    open: Mapping[str, int]
    finished: Mapping[str, int]
    running: int
    batches: Mapping[str, int]
    at_risk: int
    late_s: float


@dataclass(frozen=True, kw_only=True)
class PlanningFacts:
    """The plan in force and the price of its GPUs, if there is one, how many plans wait for an operator, and how the
    forecasts of the last day did against the `quantile` that they were asked for.
    """

    plan: Plan | None
    cost_per_hour: float | None
    waiting: int
    record: ForecastRecord
    quantile: float


@dataclass(frozen=True, kw_only=True)
class SystemFacts:
    """The whole system at one moment. `nodes` by region and state, `gpus` by region, GPU type and state, `instances` by
    model, region and state, `unplaced` instances by model and region, `latencies` as the last hour's run compared them.
    """

    nodes: Mapping[tuple[str, str], int]
    gpus: Mapping[tuple[str, str, str], int]
    instances: Mapping[tuple[str, str, str], int]
    unplaced: Mapping[tuple[str, str], int]
    latencies: Sequence[LatencyComparisonRow]
    queue: QueueFacts
    planning: PlanningFacts


def read_system_facts(session: Session, *, alive_s: float, quantile: float) -> SystemFacts:
    """Read all of it. A node is alive if it sent a heartbeat in the last `alive_s` seconds."""
    unplaced: Counter[tuple[str, str]] = Counter()
    for each in read_unplaced(session):
        unplaced[each["model"], each["region"]] += each["count"]
    return SystemFacts(
        nodes=_nodes(session, alive_s=alive_s),
        gpus=_gpus(session, alive_s=alive_s),
        instances={
            (endpoint.model, endpoint.region, state): count
            for endpoint, states in count_instances(session, alive_s=alive_s).items()
            for state, count in states.items()
        },
        unplaced=unplaced,
        latencies=session.scalars(comparisons()).all(),
        queue=_queue(session),
        planning=_planning(session, quantile),
    )


def _nodes(session: Session, *, alive_s: float) -> dict[tuple[str, str], int]:
    """How many nodes of each region are in each state."""
    state = node_state(alive_s).label("state")
    rows = session.execute(select(Node.region, state, func.count()).group_by(Node.region, "state"))
    return {(region, name): count for region, name, count in rows}


def _gpus(session: Session, *, alive_s: float) -> Counter[tuple[str, str, str]]:
    """Lost: of nodes without heartbeats; pooled: of slots with a pooled instance; spot: donated; else free."""
    spot = Instance.desired == Desired.SPOT
    held = (
        select(
            Instance.node,
            Instance.slot,
            func.bool_or(Instance.pooled).label("pooled"),
            func.sum(Instance.gpus).filter(spot).label("spot"),
            func.sum(Instance.gpus).filter(~spot).label("dedicated"),
        )
        .where(Instance.desired != Desired.STOPPED)
        .group_by(Instance.node, Instance.slot)
        .subquery()
    )
    pooled = func.coalesce(held.c.pooled, false())
    rows = session.execute(
        select(
            Node.region,
            Node.gpu_type,
            heard_of(alive_s).label("alive"),
            func.sum(Slot.gpus),
            func.sum(Slot.gpus).filter(pooled),
            func.sum(held.c.spot).filter(~pooled),
            func.sum(held.c.dedicated).filter(~pooled),
        )
        .join(Slot, Slot.node == Node.name)
        .outerjoin(held, (held.c.node == Slot.node) & (held.c.slot == Slot.index))
        .group_by(Node.region, Node.gpu_type, "alive")
    )
    counts: Counter[tuple[str, str, str]] = Counter()
    for region, gpu_type, alive, total, *sums in rows:
        taken = dict(zip(("pooled", "spot", "dedicated"), (int(each or 0) for each in sums), strict=True))
        shares = {**taken, "free": max(0, total - sum(taken.values()))} if alive else {"lost": total}
        for state in ("dedicated", "pooled", "spot", "free", "lost"):
            counts[region, gpu_type, state] += shares.get(state, 0)
    return counts


def _queue(session: Session) -> QueueFacts:
    progress = read_progress(session)
    left: Counter[str] = Counter(dict.fromkeys(progress.finished, 0))
    for group in progress.groups:
        left[group.model] += group.left
    running = select(func.count()).select_from(QueuedRequest).where(QueuedRequest.lease_until.is_not(None))
    batches = select(Batch.state, func.count()).where(Batch.ended_at.is_(None)).group_by(Batch.state)
    at_risk, late_s = read_risk(session)
    return QueueFacts(
        open=left,
        finished=dict.fromkeys(left, 0) | dict(progress.finished),
        running=session.scalar(running) or 0,
        batches=dict(session.execute(batches).all()),
        at_risk=at_risk,
        late_s=late_s,
    )


def _planning(session: Session, quantile: float) -> PlanningFacts:
    waiting = select(func.count()).where(Plan.origin == SCHEDULE, Plan.state == PlanState.DRAFT)
    plan = plan_in_force(session)
    return PlanningFacts(
        plan=plan,
        cost_per_hour=None if plan is None else cost_of(session, plan),
        waiting=session.scalar(waiting) or 0,
        record=read_scores(session, since_s=server_time_s(session) - _DAY_S),
        quantile=quantile,
    )
