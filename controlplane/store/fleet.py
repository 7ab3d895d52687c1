"""Regions, GPU types, nodes, models, profiles and endpoints. Every change bumps the fleet's index."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, case, delete, false, func, select, update
from sqlalchemy.orm import Session

from controlplane.declarations import name_fault
from controlplane.errors import ConflictError, InvalidValueError, NotFoundError
from controlplane.policies.lifecycle import InstanceState, NodeState
from controlplane.store.adapters import check_adapter, check_base, check_own_endpoint, check_with_base, tell_hosts
from controlplane.store.alias_tables import Alias, AliasTarget
from controlplane.store.latency_comparisons import drop_comparisons
from controlplane.store.profile_corrections import drop_correction
from controlplane.store.rows import Page, Row, matching, page, require
from controlplane.store.tables import (
    Desired,
    EndpointRow,
    EngineFailureRow,
    Fleet,
    GpuType,
    Instance,
    Model,
    Node,
    Profile,
    Region,
    RegionLatency,
    Slot,
)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What a gateway must know to serve: models by name, regions in their order, and the latencies between them.
    `aliases`: the weights of models by alias. `placed`: models with an instance that serves or shall soon, on a node
    that was heard of.
    """

    models: dict[str, Model]
    regions: tuple[str, ...]
    nodes: dict[str, str]
    aliases: dict[str, dict[str, int]] = field(default_factory=dict)
    latencies_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    placed: frozenset[str] = frozenset()


def bump_index(session: Session) -> int:
    """Lock the fleet and raise its index: what people and nodes change makes older plans stale. Scaling, which follows
    plans and load all the time, only raises the version: plans would never live long enough to be applied.
    """
    return _raised(session, index=Fleet.index + 1, version=Fleet.version + 1)


def _put(session: Session, row: Row) -> Row:
    """Write a row. The index rises only if the row is new or another one now."""
    fleet_index(session, lock=True)
    kept = session.merge(row)
    if kept in session.new or session.is_modified(kept):
        bump_index(session)
    return kept


def fleet_index(session: Session, *, lock: bool = False) -> int:
    """The present index; with `lock`, nobody else changes the fleet until this transaction ends, and its version
    rises, as this transaction may.
    """
    if lock:
        return _raised(session, version=Fleet.version + 1)
    index = session.scalar(select(Fleet.index).where(Fleet.id == 1))
    assert index is not None, "the migration makes the fleet's row"
    return index


def fleet_version(session: Session, *, lock: bool = False) -> int:
    """How often the fleet may have changed. With `lock`, nobody else changes it until this transaction ends; one that
    does change it then calls `note_change`.
    """
    query = select(Fleet.version).where(Fleet.id == 1)
    version = session.scalar(query.with_for_update() if lock else query)
    assert version is not None, "the migration makes the fleet's row"
    return version


def note_change(session: Session) -> None:
    """This transaction has changed the fleet, in a way that makes no plan stale."""
    _raised(session, version=Fleet.version + 1)


def _raised(session: Session, **values: ColumnElement[int]) -> int:
    """Lock the fleet and change its row; returns the index."""
    index = session.scalar(update(Fleet).where(Fleet.id == 1).values(**values).returning(Fleet.index))
    assert index is not None, "the migration makes the fleet's row"
    return int(index)


def put_region(session: Session, *, name: str, position: int | None) -> Region:
    """Register a region, or move it in the order of preference. Without a position it is the last."""
    fleet_index(session, lock=True)
    present = session.get(Region, name)
    if position is None:
        last = session.scalar(select(func.max(Region.position)))
        position = present.position if present is not None else 0 if last is None else last + 1
    row = _put(session, Region(name=name, position=position))
    session.flush()
    return row


def put_latency(session: Session, *, origin: str, destination: str, ms: float) -> RegionLatency:
    """Say how far a region is from another. Plans do not depend on it, so the fleet's index stays.

    Raises:
        InvalidValueError: it is one region.
        NotFoundError: a region is not registered.
    """
    if origin == destination:
        raise InvalidValueError(f"destination: '{destination}' is the origin itself", param="destination")
    require(session, Region, origin, param="origin")
    require(session, Region, destination, param="destination")
    return session.merge(RegionLatency(origin=origin, destination=destination, ms=ms))


def all_latencies(session: Session) -> dict[tuple[str, str], float]:
    """Milliseconds by origin and destination."""
    rows = session.execute(select(RegionLatency.origin, RegionLatency.destination, RegionLatency.ms))
    return {(origin, destination): ms for origin, destination, ms in rows}


def put_gpu_type(session: Session, *, name: str, memory_bytes: int, cost_per_hour: float) -> GpuType:
    """Register a GPU type or change what it costs."""
    return _put(session, GpuType(name=name, memory_bytes=memory_bytes, cost_per_hour=cost_per_hour))


def put_model(session: Session, model: Model) -> Model:
    """Register a model. The same registration again changes nothing; another checkpoint or task under the name is
    refused while instances of it are alive. To another engine they move one after the other, see `policies.engines`;
    how often they failed on either is forgotten.

    Raises:
        ConflictError: instances of the name, or of its adapters, run from another path, for another task or on another
            base; adapters of it have other sizes; the name is an alias; or it is offered by itself and served with its
            base.
        InvalidValueError: it is no adapter of its base, or no new model may have its name.
        NotFoundError: its base is not registered.
    """
    fleet_index(session, lock=True)
    present = session.get(Model, model.name)
    if present is None:
        _require_free(session, model.name)
    if model.base is not None:
        check_adapter(session, model, model.base)
    if model.with_base:
        check_with_base(session, present, model)
    if present is not None:
        check_base(session, present, model)
    live = select(Instance.id).where(Instance.model == model.name, Instance.desired != Desired.STOPPED).limit(1)
    if present is not None and present.path != model.path and session.scalar(live) is not None:
        raise ConflictError(f"model '{model.name}' has live instances of {present.path}", param="path")
    if present is not None and present.base != model.base and session.scalar(live) is not None:
        on = "no base" if present.base is None else f"base '{present.base}'"
        raise ConflictError(f"model '{model.name}' has live instances on {on}", param="base")
    if present is not None and model.task not in (None, present.task) and session.scalar(live) is not None:
        raise ConflictError(f"model '{model.name}' has live instances for task {present.task}", param="task")
    if present is not None and (present.engine, present.path) != (model.engine, model.path):
        session.execute(delete(EngineFailureRow).where(EngineFailureRow.model == model.name))
    for base in {row.base for row in (present, model) if row is not None and row.with_base and row.base is not None}:
        tell_hosts(session, base)
    return _put(session, model)


def check_new_name(name: str) -> None:
    """Accept a name for a new model or alias.

    Raises:
        InvalidValueError: no new thing may have it.
    """
    if (fault := name_fault(name)) is not None:
        raise InvalidValueError(f"name: {fault}", param="name")


def _require_free(session: Session, name: str) -> None:
    check_new_name(name)
    if session.get(Alias, name) is not None:
        raise ConflictError(f"'{name}' is an alias of models; nobody could ask for a model of that name", param="name")


def put_profile(session: Session, profile: Profile) -> Profile:
    """Say what an instance of a model does on a GPU type."""
    fleet_index(session, lock=True)
    require(session, Model, profile.model, param="model")
    require(session, GpuType, profile.gpu_type, param="gpu_type")
    present = session.get(Profile, (profile.model, profile.gpu_type))
    if present is not None and (present.tokens_per_s, present.latency) != (profile.tokens_per_s, profile.latency):
        drop_correction(session, profile.model, profile.gpu_type)
        drop_comparisons(session, profile.model, profile.gpu_type)
    return _put(session, profile)


def put_endpoint(session: Session, *, model: str, region: str, minimum: int, maximum: int) -> EndpointRow:
    """Offer a model in a region, with limits on its instances.

    Raises:
        InvalidValueError: the minimum is above the maximum.
        ConflictError: it is an adapter that is served with its base.
    """
    fleet_index(session, lock=True)
    check_own_endpoint(require(session, Model, model, param="model"))
    require(session, Region, region, param="region")
    if minimum > maximum:
        raise InvalidValueError(f"instances_min {minimum} is above instances_max {maximum}", param="instances_min")
    return _put(session, EndpointRow(model=model, region=region, instances_min=minimum, instances_max=maximum))


def set_node_draining(session: Session, name: str, *, draining: bool) -> Node:
    """Take a node out of service (nothing new is placed there) or back in."""
    node = require(session, Node, name, param="node")
    if node.draining != draining:
        bump_index(session)
        node.draining = draining
    return node


def list_nodes(
    session: Session,
    *,
    words: str,
    which: Mapping[str, str | None],
    state: NodeState | None,
    alive_s: float,
    after: str | None,
    limit: int,
) -> Page[Node]:
    """One page of nodes by name that contain `words`. `which`: values by column; `state`: as in `node_state`; None:
    any.
    """
    query = select(Node).where(*matching(Node, which))
    if words:
        query = query.where(Node.name.icontains(words, autoescape=True))
    if state is not None:
        query = query.where(node_state(alive_s) == state)
    return page(session, query, after=after, limit=limit)


def slots_of(session: Session, nodes: Sequence[str]) -> dict[str, list[Slot]]:
    """The slots of nodes, each node's by index."""
    slots: dict[str, list[Slot]] = {node: [] for node in nodes}
    for slot in session.scalars(select(Slot).where(Slot.node.in_(nodes)).order_by(Slot.node, Slot.index)):
        slots[slot.node].append(slot)
    return slots


def all_aliases(session: Session) -> dict[str, dict[str, int]]:
    """The weights of models by alias."""
    weights: dict[str, dict[str, int]] = {}
    rows = select(AliasTarget.alias, AliasTarget.model, AliasTarget.weight)
    for alias, model, weight in session.execute(rows.order_by(AliasTarget.alias, AliasTarget.model)):
        weights.setdefault(alias, {})[model] = weight
    return weights


def load_catalog(session: Session, *, heard_s: float = 0.0) -> Catalog:
    """Everything a gateway caches. `heard_s`: instances of nodes that sent no heartbeat for longer are not placed."""
    return Catalog(
        models={model.name: model for model in session.scalars(select(Model))},
        regions=tuple(session.scalars(select(Region.name).order_by(Region.position, Region.name))),
        nodes=dict(session.execute(select(Node.name, Node.url)).all()),
        aliases=all_aliases(session),
        latencies_ms=all_latencies(session),
        placed=frozenset(
            session.scalars(
                select(Instance.model)
                .join(Node, Node.name == Instance.node)
                .where(
                    Instance.desired == Desired.RUNNING, Instance.observed != InstanceState.FAILED, heard_of(heard_s)
                )
                .distinct()
            )
        ),
    )


def keep_models(session: Session, names: Collection[str]) -> set[str]:
    """Which of these models are registered; none of those is deleted until this transaction ends."""
    found = select(Model.name).where(Model.name.in_(names)).order_by(Model.name)
    return set(session.scalars(found.with_for_update(read=True, key_share=True)))


def known_names(session: Session) -> Mapping[str, frozenset[str]]:
    """The names that are registered: of `region`, `gpu_type` and `model`."""
    tables = {"region": Region.name, "gpu_type": GpuType.name, "model": Model.name}
    return {kind: frozenset(session.scalars(select(name))) for kind, name in tables.items()}


def heard_of(within_s: float) -> ColumnElement[bool]:
    """Whether a node sent a heartbeat in the last `within_s` seconds, on Postgres's clock: then it is alive."""
    return func.coalesce(func.extract("epoch", func.clock_timestamp() - Node.last_seen_at) <= within_s, false())


def alive_nodes(session: Session, nodes: Iterable[str], *, alive_s: float) -> frozenset[str]:
    """Those of the nodes that sent a heartbeat in the last `alive_s` seconds."""
    return frozenset(session.scalars(select(Node.name).where(Node.name.in_(list(nodes)), heard_of(alive_s))))


def node_state(alive_s: float) -> ColumnElement[str]:
    """The state of a node (`NodeState`). It is alive if it sent a heartbeat in the last `alive_s` seconds."""
    return case(
        (~heard_of(alive_s), case((_missed(), NodeState.LOST), else_=NodeState.SILENT)),
        (Node.leaving, NodeState.LEAVING),
        (Node.draining, NodeState.DRAINING),
        else_=NodeState.ALIVE,
    )


def node_states(session: Session, nodes: Iterable[str], *, alive_s: float) -> dict[str, NodeState]:
    """The states of nodes by name."""
    rows = session.execute(select(Node.name, node_state(alive_s)).where(Node.name.in_(list(nodes))))
    return {name: NodeState(state) for name, state in rows}


_MISSED_FOR_S = 24 * 3600.0
"""Machines of a cloud, and agents that were interrupted, may come back under another name or never."""


def lost_nodes(session: Session, *, alive_s: float) -> tuple[str, ...]:
    """Nodes without a heartbeat in the last `alive_s` seconds that are missed, by name: until they are heard of again,
    drained or deleted, also after their instances were placed elsewhere, but no longer than `_MISSED_FOR_S`.
    """
    lost = node_state(alive_s) == NodeState.LOST
    return tuple(session.scalars(select(Node.name).where(lost).order_by(Node.name)))


def _missed() -> ColumnElement[bool]:
    """Whether a node is missed while it is silent: it holds instances that are wanted or still draining, or it was
    heard of in the last `_MISSED_FOR_S` and neither was drained nor told that it shuts down.
    """
    holds = select(Instance.id).where(Instance.node == Node.name, Instance.desired != Desired.STOPPED).exists()
    return holds | (heard_of(_MISSED_FOR_S) & ~Node.draining & ~Node.leaving)


@dataclass(frozen=True, kw_only=True)
class NodePulse:
    """A node and its last heartbeat. `silent_s`: seconds since then, None: it has sent none; `missed`: whether it is
    lost while it sends none, as in `lost_nodes`.
    """

    name: str
    url: str
    version: str | None
    silent_s: float | None
    missed: bool


def node_pulses(session: Session) -> list[NodePulse]:
    """All nodes by name."""
    silent_s = func.extract("epoch", func.clock_timestamp() - Node.last_seen_at)
    rows = session.execute(select(Node.name, Node.url, Node.version, silent_s, _missed()).order_by(Node.name))
    return [
        NodePulse(name=name, url=url, version=version, silent_s=None if age is None else float(age), missed=missed)
        for name, url, version, age, missed in rows
    ]


def touch_node(session: Session, name: str, *, leaving: bool = False) -> Node:
    """Store that the node sent a heartbeat now, and whether its agent is shutting down. This locks its row, which must
    be locked before its instances are changed.

    Raises:
        NotFoundError: it has not joined.
    """
    touched = update(Node).where(Node.name == name).values(last_seen_at=func.now(), leaving=leaving).returning(Node)
    node: Node | None = session.scalar(touched)
    if node is None:
        raise NotFoundError(f"node '{name}' is not registered", param="node")
    return node


def all_endpoints(session: Session) -> list[EndpointRow]:
    """Every endpoint by model and region."""
    return list(session.scalars(select(EndpointRow).order_by(EndpointRow.model, EndpointRow.region)))


@dataclass(frozen=True, kw_only=True)
class FleetInventory:
    """The whole fleet at one moment. `alive`: names of nodes with a recent heartbeat. `silent_s`: seconds since each
    node's last heartbeat, of those that ever sent one.
    """

    regions: list[str]
    gpu_types: list[GpuType]
    models: list[Model]
    nodes: list[Node]
    slots: list[Slot]
    profiles: list[Profile]
    endpoints: list[EndpointRow]
    instances: list[Instance]
    alive: frozenset[str]
    silent_s: Mapping[str, float]


def read_inventory(session: Session, *, silent_s: float) -> FleetInventory:
    """Everything that placement and scaling look at; instances that are wanted or still draining. It takes several
    statements, so either the fleet is locked or the session is of one moment (`Database.one_moment`): between two
    statements of any other a node could join, and have slots without being there itself.
    """
    age_s = func.extract("epoch", func.now() - Node.last_seen_at)
    ages_s = session.execute(select(Node.name, age_s).where(Node.last_seen_at.is_not(None))).all()
    return FleetInventory(
        regions=list(session.scalars(select(Region.name).order_by(Region.position, Region.name))),
        gpu_types=list(session.scalars(select(GpuType).order_by(GpuType.name))),
        models=list(session.scalars(select(Model).order_by(Model.name))),
        nodes=list(session.scalars(select(Node).order_by(Node.name))),
        slots=list(session.scalars(select(Slot).order_by(Slot.node, Slot.index))),
        profiles=list(session.scalars(select(Profile).order_by(Profile.model, Profile.gpu_type))),
        endpoints=all_endpoints(session),
        instances=list(session.scalars(select(Instance).where(Instance.desired != "stopped").order_by(Instance.id))),
        alive=frozenset(name for name, age_s in ages_s if age_s <= silent_s),
        silent_s={name: float(age_s) for name, age_s in ages_s},
    )
