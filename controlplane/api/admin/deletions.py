"""Deleting parts of the fleet. A deletion is refused (409 `in_use`) with the list of users while there are any."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query

from controlplane.api.admin.fields import GpuTypePath, ModelPath, NodePath, RegionPath
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.admin.keys import hashes_of
from controlplane.api.admin.models import Endpoint, Model, OwnedProfile
from controlplane.api.admin.nodes import Node
from controlplane.api.admin.regions import GpuType, OwnedLatency, Region
from controlplane.api.auth import Operator, notify_gateways
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import GpuTypeName, ModelName, RegionName
from controlplane.policies.lifecycle import NodeState
from controlplane.store import removal
from controlplane.store.keys import record, snapshot

router = APIRouter(tags=["admin: fleet"], route_class=IdempotentRoute)


@router.delete("/models/{name:path}", summary="Delete a model")
def delete_model(name: ModelPath, session: SessionDep, caller: Operator) -> Model:
    """Gateways forget it within seconds. Its demand, forecasts, plans and results stay. Refused while it is offered
    anywhere, while open batches ask for it, and while a key is for it alone.
    """
    row = removal.delete_model(session, name)
    record(session, actor=caller.name, action="model.delete", subject=name, before=snapshot(row))
    return Model.model_validate(row)


@router.delete("/endpoints", summary="Offer a model in a region no more")
def delete_endpoint(
    model: Annotated[ModelName, Query()], region: Annotated[RegionName, Query()], session: SessionDep, caller: Operator
) -> Endpoint:
    """Refused while it has instances or a pin: set its limits to 0 and wait until it has drained. Instances that are
    spot and that nobody leases are given up.
    """
    row = removal.delete_endpoint(session, model=model, region=region)
    record(session, actor=caller.name, action="endpoint.delete", subject=f"{model}|{region}", before=snapshot(row))
    return Endpoint.model_validate(row)


@router.delete("/profiles", summary="Forget what a model does on a GPU type")
def delete_profile(
    model: Annotated[ModelName, Query()],
    gpu_type: Annotated[GpuTypeName, Query()],
    session: SessionDep,
    caller: Operator,
) -> OwnedProfile:
    """Refused while it has instances there. Nothing new of the model is placed on that GPU type."""
    row = removal.delete_profile(session, model=model, gpu_type=gpu_type)
    record(session, actor=caller.name, action="profile.delete", subject=f"{model}|{gpu_type}", before=snapshot(row))
    return OwnedProfile.model_validate(row)


@router.delete("/region-latencies", summary="Forget how far a region is from another")
def delete_latency(
    origin: Annotated[RegionName, Query()],
    destination: Annotated[RegionName, Query()],
    session: SessionDep,
    caller: Operator,
) -> OwnedLatency:
    """Traffic that cannot stay in its own region then tries that region after those whose latency is known."""
    row = removal.delete_latency(session, origin=origin, destination=destination)
    subject = f"{origin}|{destination}"
    record(session, actor=caller.name, action="region_latency.delete", subject=subject, before=snapshot(row))
    return OwnedLatency.model_validate(row)


@router.delete("/regions/{name}", summary="Delete a region")
def delete_region(name: RegionPath, session: SessionDep, caller: Operator) -> Region:
    """With its latencies. Refused while it has nodes or endpoints."""
    row = removal.delete_region(session, name)
    record(session, actor=caller.name, action="region.delete", subject=name, before=snapshot(row))
    return Region.model_validate(row)


@router.delete("/gpu-types/{name}", summary="Delete a GPU type")
def delete_gpu_type(name: GpuTypePath, session: SessionDep, caller: Operator) -> GpuType:
    """With the profiles of models on it; the audit keeps them. Refused while nodes have it."""
    profiles = [snapshot(profile) for profile in removal.profiles_on(session, name)]
    row = removal.delete_gpu_type(session, name)
    before = snapshot(row) | {"profiles": profiles}
    record(session, actor=caller.name, action="gpu_type.delete", subject=name, before=before)
    return GpuType.model_validate(row)


@router.delete("/nodes/{name}", summary="Delete a node")
def delete_node(
    name: NodePath, session: SessionDep, state: StateDep, caller: Operator, after_commit: BackgroundTasks
) -> Node:
    """Refused while it holds instances, and while its agent runs. Keys that speak for this node alone are revoked: for
    the node to join again, make it a new one.
    """
    row, keys = removal.delete_node(session, name, alive_s=state.settings.heartbeat_stale_s)
    before = snapshot(row)
    for key in keys:
        record(session, actor=caller.name, action="key.revoke", subject=key.id, after=snapshot(key))
    record(session, actor=caller.name, action="node.delete", subject=name, before=before)
    after_commit.add_task(notify_gateways, state, {hashed for key in keys for hashed in hashes_of(key)})
    return Node.model_validate(before | {"state": NodeState.SILENT, "alive": False, "slots": []})
