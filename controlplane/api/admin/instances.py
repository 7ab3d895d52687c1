"""Instances: desired state, and the state that the node last reported."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from msgspec import structs
from pydantic import Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.policies.lifecycle import shown_state
from controlplane.store import tables
from controlplane.store.fleet import alive_nodes
from controlplane.store.instances import list_instances as read_instances
from controlplane.store.keys import snapshot

router = APIRouter(tags=["admin: fleet"])


class Instance(Answer):
    """One copy of a model on a slot."""

    id: str = Field(examples=["inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    model: str
    region: str
    gpu_type: str
    node: str
    slot: int
    gpus: int = Field(description="of its own; 0 for a pooled one")
    pooled: bool = Field(description="it takes turns with others on all GPUs of its slot")
    desired: str = Field(description="running, draining, spot or stopped", examples=["running"])
    observed: str = Field(description="what its node last said", examples=["ready"])
    state: str = Field(description="`observed`, or `lost` while its node is not heard of", examples=["ready"])
    engine: str = Field(description="what it is told to run on; auto: its node decides", examples=["torch"])
    engine_reason: str | None = Field(examples=["chosen for the model"])
    error: str | None
    waits_for: str | None = Field(description="what keeps it from serving", examples=["its weights are loaded"])
    created_at: datetime
    changed_at: datetime


class AdapterInstance(Answer):
    """A LoRA adapter on an instance of its base, as the node last said."""

    instance_id: str = Field(examples=["inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23+helpdesk@1f2e3d4c"])
    host: str = Field(description="the instance of the base", examples=["inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    model: str = Field(examples=["helpdesk"])
    region: str
    node: str
    slot: int
    state: str = Field(examples=["ready"])
    error: str | None
    waits_for: str | None = Field(description="what keeps it from serving", examples=["its base is loaded"])


def instances_shown(session: Session, rows: Sequence[tables.Instance], *, alive_s: float) -> list[Instance]:
    """Rows as the API answers them, in their order; `alive_s`: nodes silent for longer are not alive."""
    alive = alive_nodes(session, {row.node for row in rows}, alive_s=alive_s)
    return [
        Instance.model_validate(snapshot(row) | {"state": shown_state(row.observed, node_alive=row.node in alive)})
        for row in rows
    ]


@router.get("/instances", summary="List instances")
def list_instances(
    session: SessionDep,
    state: StateDep,
    _: Viewer,
    live_only: Annotated[bool, Query(description="leave out those that are stopped")] = True,
    model: FilterWord = None,
    region: FilterWord = None,
    node: FilterWord = None,
    observed: FilterWord = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[Instance]:
    """Instances, the oldest first."""
    which = {"model": model, "region": region, "node": node, "observed": observed}
    page = read_instances(session, which=which, after=after, limit=limit, live_only=live_only)
    data = instances_shown(session, page.rows, alive_s=state.settings.heartbeat_stale_s)
    return PageOf(data=data, has_more=page.has_more, next=page.next)


@router.get("/adapter-instances", summary="List adapters that instances of their bases serve")
def list_adapter_instances(
    state: StateDep, _: Viewer, model: FilterWord = None, limit: Limit = 20, after: After = None
) -> PageOf[AdapterInstance]:
    """Adapters by the instance that serves them, as this gateway last heard of them."""
    found = sorted(
        (report.instance_id, name, node.region, report)
        for name, node in state.fleet.view.nodes.items()
        for report in node.heartbeat.instances
        if report.host is not None and model in {None, report.model} and report.instance_id > (after or "")
    )
    data = [
        AdapterInstance.model_validate(structs.asdict(report) | {"node": name, "region": region})
        for _, name, region, report in found[:limit]
    ]
    has_more = len(found) > limit
    return PageOf(data=data, has_more=has_more, next=data[-1].instance_id if has_more else None)
