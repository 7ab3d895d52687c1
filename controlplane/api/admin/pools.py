"""Slots that several models share: who has which GPU when, as the live view shows it."""

import time
from collections.abc import Mapping

from fastapi import APIRouter
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep, State, StateDep
from controlplane.store.fleet import slots_of
from controlplane.store.instances import pooled_instances, pooled_nodes
from controlplane.store.objectives import BUCKET_S, Kept, read_endpoints_kept
from controlplane.store.tables import Instance as InstanceRow
from controlplane.store.tables import Slot as SlotRow
from dataplane.protocol.messages import Heartbeat, InstanceReport
from dataplane.protocol.pool_reports import PoolReport

router = APIRouter(tags=["admin: fleet"])
_KEPT_S = 3600


class PooledInstance(BaseModel):
    """An instance that shares the GPUs of its slot."""

    instance_id: str
    model: str
    desired: str
    observed: str
    running: int = Field(description="requests in step batches")
    waiting: int = Field(description="requests that wait")
    remaining_tokens: int
    tokens: int = Field(description="of its model's interactive answers in the region, in the last 60 to 70 minutes")
    tokens_in_time: int = Field(description="of these")


class PoolKv(Answer):
    """KV of one shape in a worker's memory."""

    shape: str
    used_bytes: int
    held_bytes: int = Field(description="of the slabs that hold it")


class PoolRun(Answer):
    """Time slices of one model that followed each other."""

    model: str
    began_s: float = Field(description="Unix time")
    lasted_s: float
    switched: bool = Field(description="a switch began it")


class PoolSwitching(Answer):
    """The switches of a worker lately. What one costs is how long the weights that were missing took to load."""

    window_s: float = Field(description="a minute, or less where time slices are short or the worker is young")
    switches: int
    median_s: float = Field(description="0 where most were prefetched")
    total_s: float


class PoolWorker(BaseModel):
    """A worker process of a slot, as its node's last heartbeat says."""

    worker: int
    kind: str = Field(description="both, prefill or decode", examples=["both"])
    running_model: str | None
    next_model: str | None
    resident_models: list[str] = Field(description="with their weights whole in memory")
    load: float = Field(description="alpha, the reciprocal of the predicted attainment; above 1 it cannot keep up")
    predicted_attainment: float | None = Field(description="share of tokens in time, 0 to 1; null: nothing runs")
    switches_total: int = Field(description="since its agent started")
    switching: PoolSwitching | None = Field(description="null: no time slice yet, or its agent does not say")
    prefills_waiting: int
    slabs: dict[str, int] = Field(description="by what they hold")
    kv: list[PoolKv]
    offloaded_layers: dict[str, int] = Field(description="weight layers evicted for KV, by model")
    runs: list[PoolRun] = Field(description="the last ones, the oldest first")


class PoolSlot(BaseModel):
    """A slot that several models share."""

    slot: int
    gpus: int
    memory_bytes: int
    instances: list[PooledInstance]
    kept_attainment: float | None = Field(
        description="share of its models' tokens in the region that came in time, 0 to 1, over the last 60 to 70"
        " minutes, whichever instances made them; null: there was no interactive answer"
    )
    workers: list[PoolWorker] = Field(description="empty: its node says nothing of it, or only one model is there")


class PoolNode(BaseModel):
    """A node with such slots."""

    node: str
    region: str
    gpu_type: str
    age_s: float | None = Field(description="of its last heartbeat; null: not heard of for ten minutes")
    slots: list[PoolSlot]


@router.get("/pools", summary="Who has which shared GPU when")
def list_pools(
    session: SessionDep,
    state: StateDep,
    _: Viewer,
    region: FilterWord = None,
    node: FilterWord = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[PoolNode]:
    """Nodes with pooled instances, by name. Heartbeats come each second; where Redis is away, the last view counts."""
    page = pooled_nodes(session, which={"region": region, "name": node}, after=after, limit=limit)
    names = [row.name for row in page.rows]
    since_s = (int(time.time()) - _KEPT_S) // BUCKET_S * BUCKET_S
    slots, instances = slots_of(session, names), pooled_instances(session, names)
    models = {each.model for of_node in instances.values() for each in of_node}
    kept = read_endpoints_kept(session, models, {row.region for row in page.rows}, since_s=since_s)
    data = []
    for row in page.rows:
        beat, received_s, age_s = _heard(state, row.name)
        reports = {} if beat is None else {report.instance_id: report for report in beat.instances}
        workers = [] if beat is None else [(pool.slot, _worker(pool, received_s)) for pool in beat.pools]
        shared = [
            _slot(
                slot, [each for each in instances.get(row.name, []) if each.slot == slot.index], reports, workers, kept
            )
            for slot in slots[row.name]
        ]
        here = [slot for slot in shared if slot.instances]
        data.append(PoolNode(node=row.name, region=row.region, gpu_type=row.gpu_type, age_s=age_s, slots=here))
    return PageOf(data=data, has_more=page.has_more, next=page.next)


def _heard(state: State, node: str) -> tuple[Heartbeat | None, float, float | None]:
    """A node's last heartbeat, when it arrived, and its age."""
    view = state.fleet.view
    found = view.nodes.get(node)
    if found is None:
        return None, 0.0, None
    return found.heartbeat, found.received_s, max(0.0, view.read_s - found.received_s)


def _slot(
    slot: SlotRow,
    instances: list[InstanceRow],
    reports: dict[str, InstanceReport],
    workers: list[tuple[int, PoolWorker]],
    kept: Mapping[tuple[str, str], Kept],
) -> PoolSlot:
    shown = []
    of_models = {each.model: kept.get((each.model, each.region), Kept()) for each in instances}
    for each in instances:
        report = reports.get(each.id)
        shown.append(
            PooledInstance(
                instance_id=each.id,
                model=each.model,
                desired=each.desired,
                observed=each.observed,
                running=0 if report is None else report.running,
                waiting=0 if report is None else report.waiting,
                remaining_tokens=0 if report is None else report.remaining_tokens,
                tokens=of_models[each.model].tokens,
                tokens_in_time=of_models[each.model].tokens_in_time,
            )
        )
    here = [worker for number, worker in workers if number == slot.index]
    together = Kept()
    for counts in of_models.values():
        together.add(counts)
    return PoolSlot(
        slot=slot.index,
        gpus=slot.gpus,
        memory_bytes=slot.memory_bytes,
        instances=shown,
        kept_attainment=together.tokens_in_time / together.tokens if together.tokens else None,
        workers=here,
    )


def _worker(pool: PoolReport, received_s: float) -> PoolWorker:
    return PoolWorker(
        worker=pool.worker,
        kind=pool.kind,
        running_model=pool.running_model,
        next_model=pool.next_model,
        resident_models=list(pool.resident_models),
        load=pool.load,
        predicted_attainment=min(1.0, 1.0 / pool.load) if pool.load > 0 else None,
        switches_total=pool.switches_total,
        switching=None if pool.switching is None else PoolSwitching.model_validate(pool.switching),
        prefills_waiting=pool.prefills_waiting,
        slabs=pool.slabs,
        kv=[PoolKv.model_validate(each) for each in pool.kv],
        offloaded_layers=pool.offloaded_layers,
        runs=[
            PoolRun(model=run.model, began_s=received_s - run.began_ago_s, lasted_s=run.lasted_s, switched=run.switched)
            for run in pool.runs
        ],
    )
