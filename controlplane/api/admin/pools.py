"""Slots that several models share: who has which GPU when, as the live view shows it."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep, State, StateDep
from controlplane.store.fleet import slots_of
from controlplane.store.instances import pooled_instances, pooled_nodes
from controlplane.store.tables import Instance as InstanceRow
from controlplane.store.tables import Slot as SlotRow
from dataplane.protocol.messages import Heartbeat, InstanceReport, PoolReport

router = APIRouter(tags=["admin: fleet"])


class PooledInstance(BaseModel):
    """An instance that shares the GPUs of its slot."""

    instance_id: str
    model: str
    desired: str
    observed: str
    running: int = Field(description="requests in step batches")
    waiting: int = Field(description="requests that wait")
    remaining_tokens: int


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
    slots, instances = slots_of(session, names), pooled_instances(session, names)
    data = []
    for row in page.rows:
        beat, received_s, age_s = _heard(state, row.name)
        reports = {} if beat is None else {report.instance_id: report for report in beat.instances}
        workers = [] if beat is None else [(pool.slot, _worker(pool, received_s)) for pool in beat.pools]
        shared = [
            _slot(slot, [each for each in instances.get(row.name, []) if each.slot == slot.index], reports, workers)
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
) -> PoolSlot:
    shown = []
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
            )
        )
    here = [worker for number, worker in workers if number == slot.index]
    return PoolSlot(slot=slot.index, gpus=slot.gpus, memory_bytes=slot.memory_bytes, instances=shown, workers=here)


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
        prefills_waiting=pool.prefills_waiting,
        slabs=pool.slabs,
        kv=[PoolKv.model_validate(each) for each in pool.kv],
        offloaded_layers=pool.offloaded_layers,
        runs=[
            PoolRun(model=run.model, began_s=received_s - run.began_ago_s, lasted_s=run.lasted_s, switched=run.switched)
            for run in pool.runs
        ],
    )
