"""Deleting models, endpoints, regions, GPU types and nodes, which is refused while anything uses them.

What is deleted takes its own rows with it: profiles, latencies, ended overrides, stopped instances, and donated
instances that nobody leases. Demand, forecasts, plans, results and the audit have no foreign keys to the fleet and keep
its names. Callers look first to say what uses it; that nothing does is held by the foreign keys.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import ColumnElement, Delete, Select, and_, delete, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InUseError, Use
from controlplane.store.adapters import tell_hosts
from controlplane.store.alias_tables import AliasTarget
from controlplane.store.batch_tables import Batch, BatchModel
from controlplane.store.fleet import alive_nodes, bump_index, fleet_index
from controlplane.store.instances import LIVE, touch_generations
from controlplane.store.keys import ApiKey
from controlplane.store.leases import ACTIVE
from controlplane.store.overrides import ReplicaOverride
from controlplane.store.rows import require
from controlplane.store.tables import (
    Base,
    Desired,
    EndpointRow,
    EngineFailureRow,
    GpuType,
    Instance,
    InstanceLease,
    Model,
    Node,
    Profile,
    Region,
    RegionLatency,
)

_NAMES_MAX = 5
Users = Callable[[], list[Use | None]]


def delete_model(session: Session, name: str) -> Model:
    """Delete a model, with its profiles.

    Raises:
        NotFoundError: there is none of the name.
        InUseError: endpoints, aliases, adapters, open batches, or keys that are for this model alone use it.

    Instances that serve an adapter with its base drain its requests, and go on.
    """
    fleet_index(session, lock=True)
    model = require(session, Model, name, param="model")
    session.refresh(model, with_for_update=True)  # a batch that keeps it while it begins is open then
    endpoints = select(EndpointRow.region).where(EndpointRow.model == name)
    aliases = select(AliasTarget.alias).where(AliasTarget.model == name)
    adapters = select(Model.name).where(Model.base == name)
    batches = select(Batch.id).join(BatchModel, BatchModel.batch_number == Batch.number)
    batches = batches.where(BatchModel.model == name, Batch.ended_at.is_(None))
    keys = select(ApiKey.id).where(ApiKey.models == [name], ApiKey.revoked_at.is_(None))
    keys = keys.where(or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()))
    _delete(
        session,
        model,
        f"model '{name}'",
        lambda: [
            _use(session, "endpoint", endpoints, then="delete it with `tidepool endpoint delete`"),
            _use(session, "alias", aliases, then="give it other models"),
            _use(session, "adapter", adapters, then="delete it with `tidepool model delete`"),
            _use(session, "open batch", batches, then="let it end, or cancel it"),
            _use(session, "key", keys, then="revoke it: it is for this model alone"),
        ],
    )
    if model.with_base and model.base is not None:
        tell_hosts(session, model.base)
    return model


def delete_profile(session: Session, *, model: str, gpu_type: str) -> Profile:
    """Forget what a model does on a GPU type.

    Raises:
        NotFoundError: it has no profile there.
        InUseError: it has instances there.
    """
    fleet_index(session, lock=True)
    profile = require(session, Profile, (model, gpu_type), param="profile")
    there = and_(Instance.model == model, Instance.gpu_type == gpu_type)
    _delete(
        session, profile, f"profile of {model} on {gpu_type}", lambda: _instances(session, there, then="drain them")
    )
    return profile


def delete_latency(session: Session, *, origin: str, destination: str) -> RegionLatency:
    """Forget how far a region is from another. Plans do not depend on it.

    Raises:
        NotFoundError: nobody said it.
    """
    fleet_index(session, lock=True)
    latency = require(session, RegionLatency, (origin, destination), param="latency")
    session.delete(latency)
    session.flush()
    return latency


def delete_endpoint(session: Session, *, model: str, region: str) -> EndpointRow:
    """Offer a model in a region no more.

    Raises:
        NotFoundError: it is not offered there.
        InUseError: it has instances, leased ones among them, or a replica override is in force.
    """
    fleet_index(session, lock=True)
    endpoint = require(session, EndpointRow, (model, region), param="endpoint")
    here = and_(Instance.model == model, Instance.region == region)
    overrides = select(ReplicaOverride.id).where(ReplicaOverride.model == model, ReplicaOverride.region == region)
    overrides = overrides.where(ReplicaOverride.removed_at.is_(None), ReplicaOverride.until > func.now())
    _delete(
        session,
        endpoint,
        f"endpoint {model} in {region}",
        lambda: [
            *_instances(session, here, then="set --min 0 --max 0 and wait until it is drained, or use --drain"),
            _use(session, "pin", overrides, then="remove it"),
        ],
        instances=here,
    )
    return endpoint


def delete_region(session: Session, name: str) -> Region:
    """Delete a region, with its latencies.

    Raises:
        NotFoundError: there is none of the name.
        InUseError: it has nodes or endpoints.
    """
    fleet_index(session, lock=True)
    region = require(session, Region, name, param="region")
    nodes = select(Node.name).where(Node.region == name)
    endpoints = select(EndpointRow.model).where(EndpointRow.region == name)
    _delete(
        session,
        region,
        f"region '{name}'",
        lambda: [
            _use(session, "node", nodes, then="delete it"),
            _use(session, "endpoint", endpoints, then="delete it"),
        ],
    )
    return region


def profiles_on(session: Session, gpu_type: str) -> list[Profile]:
    """What models do on a GPU type, by model."""
    return list(session.scalars(select(Profile).where(Profile.gpu_type == gpu_type).order_by(Profile.model)))


def delete_gpu_type(session: Session, name: str) -> GpuType:
    """Delete a GPU type, with what models do on it.

    Raises:
        NotFoundError: there is none of the name.
        InUseError: nodes have it.
    """
    fleet_index(session, lock=True)
    gpu_type = require(session, GpuType, name, param="gpu_type")
    nodes = select(Node.name).where(Node.gpu_type == name)
    of_type = Instance.gpu_type == name
    _delete(
        session,
        gpu_type,
        f"GPU type '{name}'",
        lambda: [_use(session, "node", nodes, then="delete it"), *_instances(session, of_type, then="drain it")],
        instances=of_type,
        own=[delete(table).where(table.gpu_type == name) for table in (Profile, EngineFailureRow)],
    )
    return gpu_type


def delete_node(session: Session, name: str, *, alive_s: float) -> tuple[Node, list[ApiKey]]:
    """Delete a node, and revoke the keys that speak for it alone: an agent of that name needs a new one to join again.
    Returns the node and these keys. A node is alive if it sent a heartbeat at most `alive_s` seconds ago.

    Raises:
        NotFoundError: there is none of the name.
        InUseError: it holds instances.
        ConflictError: its agent still runs, and would join again.
    """
    fleet_index(session, lock=True)
    node = require(session, Node, name, param="node")
    here = Instance.node == name

    def users() -> list[Use | None]:
        return _instances(session, here, then="drain the node, or use --drain")

    _refuse(f"node '{name}'", users())
    if alive_nodes(session, [name], alive_s=alive_s):
        raise ConflictError(f"node '{name}' is alive: stop its agent first, or it would join again", param="node")
    keys = list(session.scalars(select(ApiKey).where(ApiKey.node == name, ApiKey.revoked_at.is_(None))))
    now = session.scalar(select(func.now()))
    for key in keys:
        key.revoked_at = now
    _delete(session, node, f"node '{name}'", users, instances=here)
    return node, keys


def _instances(session: Session, which: ColumnElement[bool], *, then: str) -> list[Use | None]:
    """Instances in use: those that serve or drain, and those that are leased."""
    serving = select(Instance.id).where(which, LIVE, Instance.desired != Desired.SPOT)
    leased = (
        select(InstanceLease.instance_id).join(Instance, Instance.id == InstanceLease.instance_id).where(which, ACTIVE)
    )
    return [
        _use(session, "instance", serving, then=then),
        _use(session, "leased spot instance", leased, then="wait for the lease's end, or return it"),
    ]


def _use(session: Session, kind: str, names: Select[str], *, then: str) -> Use | None:
    count = session.scalar(select(func.count()).select_from(names.subquery())) or 0
    if not count:
        return None
    column = names.selected_columns[0]
    return Use(
        kind=kind, count=count, names=tuple(session.scalars(names.order_by(column).limit(_NAMES_MAX))), then=then
    )


def _refuse(what: str, users: Sequence[Use | None]) -> None:
    used_by = tuple(use for use in users if use is not None)
    if used_by:
        raise InUseError(what, used_by)


def _delete(
    session: Session,
    row: Base,
    what: str,
    users: Users,
    *,
    instances: ColumnElement[bool] | None = None,
    own: Sequence[Delete] = (),
) -> None:
    """Delete a row with its idle `instances` and its `own` rows of other tables, unless it has users."""
    _refuse(what, users())
    try:
        with session.begin_nested():
            if instances is not None:
                _forget_instances(session, instances)
            for mine in own:
                session.execute(mine)
            session.delete(row)
            session.flush()
    except IntegrityError:
        _refuse(what, users())
        raise ConflictError(f"{what} has just come into use; try again") from None
    bump_index(session)


def _forget_instances(session: Session, which: ColumnElement[bool]) -> None:
    """Delete stopped and unleased donated instances; their nodes unload the latter. Instances in use were refused
    before.
    """
    idle = and_(which, or_(Instance.desired == Desired.STOPPED, Instance.desired == Desired.SPOT))
    held = select(Instance.node).where(which, Instance.desired == Desired.SPOT).distinct().order_by(Instance.node)
    touch_generations(session, list(session.scalars(held)))
    session.execute(delete(Instance).where(idle))
