"""Instances: what is wanted of each and what its node last said."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from controlplane.api.admin.fields import After, Answer, Limit, PageOf, page_of
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store.instances import list_instances as read_instances

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
    engine: str = Field(description="what it is told to run on; auto: its node decides", examples=["torch"])
    engine_reason: str | None = Field(examples=["chosen for the model"])
    error: str | None
    waits_for: str | None = Field(description="what keeps it from serving", examples=["its weights are loaded"])
    created_at: datetime
    changed_at: datetime


@router.get("/instances", summary="List instances")
def list_instances(
    session: SessionDep,
    _: Viewer,
    live_only: Annotated[bool, Query(description="leave out those that are stopped")] = True,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[Instance]:
    """Instances, the oldest first."""
    page = read_instances(session, after=after, limit=limit, live_only=live_only)
    return page_of(Instance, page, lambda row: row.id)
