"""Instances: what is wanted of them, and what nodes report. A node's generation rises with every change for it.

Letting an instance go ends in one of two ways, and its node's report brings it about: stopped, or lent out as spot.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import uuid_utils
from msgspec import structs
from sqlalchemy import func, select, tuple_, update
from sqlalchemy.orm import Session

from controlplane.policies.engines import TORCH, VLLM
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import INSTANCE, InstanceState, can_move
from controlplane.store.adapters import adapter_instance_id, served_with, serves_adapters
from controlplane.store.demand import IW, mean_demand
from controlplane.store.fleet import fleet_index
from controlplane.store.leases import active_leases, end_leases
from controlplane.store.rows import Page, delete_some, matching, page
from controlplane.store.storable import storable
from controlplane.store.tables import Desired, Instance, LeaseEnd, Model, Node, Slot
from controlplane.store.terms import current_term
from dataplane.protocol.messages import (
    BaseModel,
    DesiredInstance,
    DesiredInstances,
    EngineChoice,
    Heartbeat,
    InstanceReport,
    ModelSpec,
)
from dataplane.protocol.tiers import InstanceKind

_HOUR_S = 3600
_GENERATION_MAX = 2**62
LIVE = Instance.desired != Desired.STOPPED


def live_instances(session: Session) -> list[Instance]:
    """Every instance that is wanted or still draining, oldest first."""
    return list(session.scalars(select(Instance).where(LIVE).order_by(Instance.id)))


def running_instances(session: Session, *, observed: InstanceState | None = None) -> list[Instance]:
    """Every instance that is wanted to serve, oldest first; of one state, if that is named."""
    query = select(Instance).where(Instance.desired == Desired.RUNNING).order_by(Instance.id)
    return list(session.scalars(query if observed is None else query.where(Instance.observed == observed)))


def list_instances(
    session: Session, *, which: Mapping[str, str | None], after: str | None, limit: int, live_only: bool
) -> Page[Instance]:
    """One page of instances by id, which is their order of creation. `which`: values by column; None: any."""
    query = select(Instance).where(*matching(Instance, which))
    return page(session, query.where(LIVE) if live_only else query, after=after, limit=limit)


def instances_of(session: Session, node: str) -> list[Instance]:
    """The live instances of a node, oldest first."""
    return list(session.scalars(select(Instance).where(Instance.node == node, LIVE).order_by(Instance.id)))


def pooled_nodes(session: Session, *, which: Mapping[str, str | None], after: str | None, limit: int) -> Page[Node]:
    """One page of nodes with live pooled instances, by name. `which`: values by column; None: any."""
    pooled = select(Instance.id).where(Instance.node == Node.name, Instance.pooled, LIVE).exists()
    return page(session, select(Node).where(pooled, *matching(Node, which)), after=after, limit=limit)


def pooled_instances(session: Session, nodes: Collection[str]) -> dict[str, list[Instance]]:
    """The live pooled instances of nodes, each node's by model."""
    found: dict[str, list[Instance]] = {}
    query = select(Instance).where(Instance.node.in_(nodes), Instance.pooled, LIVE)
    for instance in session.scalars(query.order_by(Instance.node, Instance.slot, Instance.model)):
        found.setdefault(instance.node, []).append(instance)
    return found


def count_of_nodes(session: Session, nodes: Collection[str]) -> dict[str, tuple[int, int]]:
    """By node, its live instances, and those of them that drain."""
    rows = session.execute(
        select(Instance.node, func.count(), func.count().filter(Instance.desired == Desired.DRAINING))
        .where(Instance.node.in_(nodes), LIVE)
        .group_by(Instance.node)
    )
    return {node: (count, leaving) for node, count, leaving in rows}


def add_instance(
    session: Session,
    *,
    model: str,
    region: str,
    gpu_type: str,
    node: str,
    slot: int,
    gpus: int,
    kind: InstanceKind = InstanceKind.MIXED,
    succeeds: str | None = None,
) -> Instance:
    """Add a desired instance on a slot. One without GPUs of its own is pooled. `succeeds`: the instance that it
    replaces because that one's node is leaving.
    """
    instance = Instance(
        id=f"inst_{uuid_utils.uuid7().hex}",
        model=model,
        region=region,
        gpu_type=gpu_type,
        node=node,
        slot=slot,
        gpus=gpus,
        pooled=gpus == 0,
        desired=Desired.RUNNING,
        observed=InstanceState.PENDING,
        kind=kind,
        succeeds=succeeds,
    )
    session.add(instance)
    return instance


def set_desired(session: Session, ids: Iterable[str], desired: Desired, *, donate: bool = False) -> None:
    """Change what is wanted of instances; stopped ones stay stopped. `donate`: draining ones are donated once empty.
    A donated instance that is stopped ends at once, with the lessee's requests.
    """
    values: dict[str, Any] = {"desired": desired, "donate": donate, "changed_at": func.now()}
    values["spot_at"] = func.now() if desired == Desired.SPOT else None
    if desired == Desired.STOPPED:
        values["observed"] = InstanceState.STOPPED
    session.execute(update(Instance).where(Instance.id.in_(list(ids)), LIVE).values(**values))


def set_dedicated(session: Session, gpus: Mapping[str, int]) -> None:
    """Give pooled instances, by id, so many GPUs for themselves."""
    for instance_id, count in gpus.items():
        instance = session.get_one(Instance, instance_id)
        instance.gpus, instance.pooled = count, False


def set_kind(session: Session, ids: Iterable[str], kind: InstanceKind) -> None:
    """Let instances serve other requests."""
    session.execute(update(Instance).where(Instance.id.in_(list(ids)), LIVE).values(kind=kind))


def set_succeeds(session: Session, successors: Mapping[str, str | None]) -> None:
    """Say which instance each of these succeeds; None: it is an ordinary one now."""
    for instance_id, succeeded in successors.items():
        session.get_one(Instance, instance_id).succeeds = succeeded


def set_engine(instance: Instance, engine: EngineChoice, *, moves: bool) -> None:
    """Let an instance run on an engine. `moves`: it leaves the other one for that, from now (the database's time) on.
    A failed one is pending again.
    """
    instance.engine = engine
    if moves:
        instance.came_from, instance.changed_at = TORCH if engine == VLLM else VLLM, func.now()
    elif instance.observed == InstanceState.FAILED:
        instance.observed, instance.error, instance.changed_at = InstanceState.PENDING, None, func.now()


def touch_generations(session: Session, nodes: Sequence[str]) -> None:
    """Tell nodes that what they shall hold has changed. Their rows are locked: call it before changing instances, under
    the fleet's lock, so that writers meet in one order (fleet, node, instance) and never wait for each other in a ring.
    """
    if nodes:
        session.execute(update(Node).where(Node.name.in_(nodes)).values(generation=Node.generation + 1))


def desired_of(session: Session, node: str, *, starts_s: int | None = None) -> DesiredInstances:
    """The desired state of a node as it is sent, the oldest instance first. For a node that starts at the Unix time
    `starts_s` and must load everything, endpoints with most interactive demand in the hour before are first.
    """
    query = select(Instance, Model, serves_adapters()).join(Model, Model.name == Instance.model)
    found = session.execute(query.where(Instance.node == node, LIVE).order_by(Instance.id)).all()
    adapters = served_with(session, {model.name for _, model, serves in found if serves})
    rows = [(instance, model) for instance, model, _ in found]
    if starts_s is not None:
        demand = mean_demand(session, kind=IW, since_s=starts_s - _HOUR_S, until_s=starts_s)
        rows.sort(key=lambda row: -demand.get(Endpoint(model=row[0].model, region=row[0].region), 0.0))
    named = {model.base for _, model in rows if model.base is not None}
    bases = {base.name: base for base in session.scalars(select(Model).where(Model.name.in_(named)))} if named else {}
    lent = any(instance.desired == Desired.SPOT for instance, _ in rows)
    leases = active_leases(session, node=node) if lent else {}
    row = session.get_one(Node, node)
    return DesiredInstances(
        generation=row.generation,
        layout=present_layout(session, node) if row.regroups else None,
        term=current_term(session),
        handing_over=row.leaving and _is_handing_over(session, [instance for instance, _ in rows]),
        instances=tuple(
            wanted
            for instance, model in rows
            for wanted in _with_adapters(
                _wanted(
                    instance,
                    model_spec(model, instance.engine, base=bases.get(model.base or "")),
                    leases[instance.id].id if instance.id in leases else None,
                ),
                model,
                adapters.get(model.name, ()),
            )
        ),
    )


def present_layout(session: Session, node: str) -> tuple[int, ...]:
    """The sizes of a node's slots."""
    return tuple(session.scalars(select(Slot.gpus).where(Slot.node == node).order_by(Slot.index)))


def _is_handing_over(session: Session, held: Sequence[Instance]) -> bool:
    """Whether it is worth a node's while to wait before it shuts down: some instance drains, or is being started
    elsewhere for the same endpoint as one that still serves here.
    """
    if any(instance.desired == Desired.DRAINING for instance in held):
        return True
    endpoints = {(each.model, each.region) for each in held if each.desired == Desired.RUNNING}
    starting = select(Instance.id).where(
        tuple_(Instance.model, Instance.region).in_(endpoints),
        Instance.node.not_in({each.node for each in held}),
        Instance.desired == Desired.RUNNING,
        Instance.observed.in_([InstanceState.PENDING, InstanceState.LOADING]),
    )
    return bool(endpoints) and session.scalar(starting.limit(1)) is not None


def _wanted(instance: Instance, model: ModelSpec, lease_id: str | None) -> DesiredInstance:
    spot = instance.donate or instance.desired == Desired.SPOT
    return DesiredInstance(
        instance_id=instance.id,
        slot=instance.slot,
        gpus=instance.gpus,
        model=model,
        draining=instance.desired == Desired.DRAINING and not spot,
        spot=spot,
        lease_id=lease_id,
        kind=InstanceKind(instance.kind),
    )


def _with_adapters(host: DesiredInstance, base: Model, adapters: Iterable[Model]) -> Iterator[DesiredInstance]:
    """An instance, and the adapters that it serves. It is lent out without them."""
    yield host
    for adapter in adapters:
        yield structs.replace(
            host,
            instance_id=adapter_instance_id(host.instance_id, adapter),
            model=model_spec(adapter, host.model.engine, base=base),
            draining=host.draining or host.spot,
            spot=False,
            lease_id=None,
            host=host.instance_id,
        )


def model_spec(model: Model, engine: EngineChoice, *, base: Model | None = None) -> ModelSpec:
    """A model as a node knows it, on the engine of one instance. `base`: that of a LoRA adapter."""
    return ModelSpec(
        name=model.name,
        path=model.path,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        context_tokens=model.context_tokens,
        engine=engine,
        task=model.task,
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
        base=None if base is None else BaseModel(name=base.name, path=base.path, weights_bytes=base.weights_bytes),
    )


def observe(session: Session, heartbeat: Heartbeat) -> None:
    """Write down what a node reports. A draining instance that a node following the newest generation no longer holds
    is stopped, one that it holds empty is donated; a running one that it does not hold yet is pending. One that failed
    keeps its error, and the time of its first failure, while its node tries to load it again.
    """
    reports = {report.instance_id: report for report in heartbeat.instances}
    node = session.get(Node, heartbeat.node)
    assert node is not None, "the caller checked that the node is registered"
    if node.generation < heartbeat.generation < _GENERATION_MAX:
        node.generation = heartbeat.generation + 1  # the database was restored: the node would refuse older ones
    changed = False
    for instance in session.scalars(select(Instance).where(Instance.node == heartbeat.node, LIVE)):
        report = reports.get(instance.id)
        current = heartbeat.generation >= node.generation
        if instance.desired == Desired.DRAINING and current:
            changed |= _follow_draining(session, instance, report)
        state = _state_of(report, instance)
        changed |= _move(instance, state)
        if report is None or report.error is not None or state != InstanceState.LOADING:
            instance.error = None if report is None else storable(report.error)
        instance.waits_for = None if report is None else storable(report.waits_for)
    if changed:
        touch_generations(session, [heartbeat.node])


def _follow_draining(session: Session, instance: Instance, report: InstanceReport | None) -> bool:
    """Whether the node needs a new desired state: the instance drained, or failed before it could be donated."""
    if not instance.donate:
        return report is None and _end_draining(session, instance, desired=Desired.STOPPED)
    if report is not None and report.state == "spot":
        _end_draining(session, instance, desired=Desired.SPOT, donate=False, spot_at=func.now())
    if report is not None and report.state == "failed":
        return _end_draining(session, instance, donate=False)
    return False


def _end_draining(session: Session, instance: Instance, **values: Any) -> bool:
    """Whether the state of a drained instance changed; one that scaling has just reclaimed is left alone."""
    ended = session.scalar(
        update(Instance)
        .where(Instance.id == instance.id, Instance.desired == Desired.DRAINING, Instance.donate == instance.donate)
        .values(changed_at=func.now(), **values)
        .returning(Instance.id)
    )
    return ended is not None


def _state_of(report: InstanceReport | None, instance: Instance) -> InstanceState:
    if report is not None:
        return InstanceState(report.state)
    return InstanceState.STOPPED if instance.desired == Desired.STOPPED else InstanceState.PENDING


def _move(instance: Instance, state: InstanceState) -> bool:
    """Whether the instance has stopped. A failed load that is retried is no change."""
    before = InstanceState(instance.observed)
    if before == state:
        return False
    assert can_move(INSTANCE, before, state), f"{before} -> {state}"
    instance.observed = state
    if instance.error is None or {before, state} != {InstanceState.FAILED, InstanceState.LOADING}:
        instance.changed_at = func.now()
    return state == InstanceState.STOPPED


def forget_stopped(session: Session, *, keep_s: float, count_max: int) -> int:
    """Delete at most `count_max` instances that were stopped longer ago, with their leases; returns how many. The audit
    log keeps what it says of them.
    """
    before = func.now() - timedelta(seconds=keep_s)
    old = (
        Instance.desired == Desired.STOPPED,
        Instance.observed == InstanceState.STOPPED,
        Instance.changed_at < before,
    )
    if session.scalar(select(Instance.id).where(*old).limit(1)) is None:
        return 0
    fleet_index(session, lock=True)  # instances that succeed one of them change with it
    return delete_some(session, Instance, *old, order=Instance.changed_at, count_max=count_max)


def lose_silent_nodes(session: Session, *, silent_s: float, heard_s: float, grace_s: float) -> list[str]:
    """Stop the instances of nodes that sent no heartbeat for `silent_s` seconds; returns the nodes that hold none then.

    Nothing is done unless some other node sent a heartbeat within `heard_s`: else the control plane itself was down.
    After that the first node to return is heard before the others. So an instance, also a draining or donated one, is
    set back to pending first, and is stopped with its lease `grace_s` later, if its node has not returned; one that was
    placed after its node's last heartbeat has its grace from then. The fleet is locked only if such nodes have
    instances.
    """
    age_s = func.extract("epoch", func.now() - Node.last_seen_at)
    if session.scalar(select(Node.name).where(age_s <= heard_s).limit(1)) is None:
        return []
    silent = select(Node.name).where(age_s > silent_s).order_by(Node.name)
    if session.scalar(select(Instance.id).where(Instance.node.in_(silent), LIVE).limit(1)) is None:
        return list(session.scalars(silent))
    fleet_index(session, lock=True)
    locked = select(Node).where(age_s > silent_s).order_by(Node.name).with_for_update()
    nodes = {node.name: node for node in session.scalars(locked)}
    now = session.scalar(select(func.now()))
    assert now is not None
    stopped: set[str] = set()
    waiting: set[str] = set()
    gone: list[str] = []
    for instance in session.scalars(select(Instance).where(Instance.node.in_(nodes), LIVE).order_by(Instance.id)):
        seen_at = nodes[instance.node].last_seen_at
        assert seen_at is not None
        if instance.observed != InstanceState.PENDING or instance.changed_at <= seen_at:
            _move(instance, InstanceState.PENDING)
            instance.changed_at = now
        elif now - instance.changed_at > timedelta(seconds=grace_s):
            instance.desired, instance.donate, instance.spot_at = Desired.STOPPED, False, None
            _move(instance, InstanceState.STOPPED)
            stopped.add(instance.node)
            gone.append(instance.id)
            continue
        waiting.add(instance.node)
    end_leases(session, gone, LeaseEnd.LOST)
    touch_generations(session, sorted(stopped))
    return sorted(nodes.keys() - waiting)
