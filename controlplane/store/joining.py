"""Nodes that join: what they offer, and what becomes of the instances they held before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import case, delete, func, select
from sqlalchemy.orm import Session

from controlplane.declarations import name_fault
from controlplane.errors import ConflictError, InvalidValueError
from controlplane.store.fleet import bump_index, fleet_version
from controlplane.store.instances import instances_of, present_layout, set_desired, touch_generations
from controlplane.store.keys import snapshot
from controlplane.store.layouts import slots_like
from controlplane.store.leases import end_leases
from controlplane.store.rows import require
from controlplane.store.tables import Desired, GpuType, Instance, LeaseEnd, Node, Region, Slot
from dataplane.protocol.joining import Join


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A node that joined. `lost`: ids of instances that no longer fit on its slots."""

    node: Node
    lost: tuple[str, ...] = ()


def join_node(session: Session, join: Join) -> Joined:
    """Register a node, also after a restart: then it was heard of now, since its first heartbeat follows. Instances
    that no longer fit on its slots are stopped with their leases: their workers ended with the previous agent, and
    scaling starts others. A slot that is gone takes the rows of its instances with it.

    Raises:
        InvalidValueError: no new node may have its name.
        NotFoundError: the region or GPU type is not registered.
        ConflictError: the node has live instances, and joins from another region or with other GPUs; or its GPU type
            has slots of several hosts and others.
    """
    require(session, Region, join.region, param="region")
    require(session, GpuType, join.gpu_type, param="gpu_type")
    if join.regroups:
        fleet_version(session, lock=True)  # from here on nobody else regroups it
    present = session.get(Node, join.node, populate_existing=True)
    if present is None and (fault := name_fault(join.node)) is not None:
        raise InvalidValueError(f"node: {fault}", param="node")
    slots = _slots_of(session, present, join)
    names = ("region", "gpu_type", "url", "engine", "host_bytes", "dtype", "regroups")
    offered = {name: getattr(join, name) for name in names}
    if present is not None and _is_as_before(session, present, offered, slots):
        present.version, present.engine_version = join.version, join.engine_version
        joined = Joined(node=present)
    else:
        joined = _changed(session, present, join, offered, slots)
    if present is not None:
        present.last_seen_at, present.leaving = func.now(), False
    return joined


def _changed(
    session: Session, present: Node | None, join: Join, offered: Mapping[str, Any], slots: Sequence[Slot]
) -> Joined:
    """A node that is new, or another one than before."""
    bump_index(session)
    _check_hosts(session, join, slots)
    lost = () if present is None else _give_up(session, present, join, slots)
    node = session.merge(Node(name=join.node, **offered, version=join.version, engine_version=join.engine_version))
    session.flush()
    if node.layout is not None and not (join.regroups and sum(node.layout) == sum(slot.gpus for slot in slots)):
        node.layout = node.layout_at = None
    if not join.regroups:
        node.layout_held, node.layout_chosen_at = False, None
    kept = [slot.index for slot in slots]
    session.execute(delete(Instance).where(Instance.node == join.node, Instance.slot.not_in(kept)))
    session.execute(delete(Slot).where(Slot.node == join.node, Slot.index.not_in(kept)))
    for slot in slots:
        session.merge(slot)
    session.flush()
    return Joined(node=node, lost=lost)


def _slots_of(session: Session, present: Node | None, join: Join) -> list[Slot]:
    """The slots that a node has from now on: those it joins with, or, if it regroups its GPUs and has as many as
    before, those that they were grouped into. It is told these.
    """
    offered = []
    for place, spec in enumerate(join.slots):
        values = msgspec.structs.asdict(spec)
        number = values.pop("number")
        offered.append(Slot(node=join.node, index=place if number is None else number, **values))
    if present is None or not (present.regroups and join.regroups):
        return offered
    layout = present_layout(session, join.node)
    return slots_like(offered[0], layout) if sum(layout) == sum(slot.gpus for slot in offered) else offered


def _check_hosts(session: Session, join: Join, slots: Sequence[Slot]) -> None:
    """Let slots of several hosts have a GPU type of their own, all of one size: a plan counts the GPUs of a type, and
    a model takes all of such a slot. Those of older agents, which do not say of how many hosts they are, pass.
    """
    kinds = {slot.gpus if slot.hosts > 1 else 0 for slot in slots if slot.hosts is not None}
    kind = case((Slot.hosts > 1, Slot.gpus), else_=0)
    others = select(Slot.node).join(Node, Node.name == Slot.node)
    others = others.where(Node.gpu_type == join.gpu_type, Node.name != join.node, Slot.hosts.is_not(None))
    other = join.node if len(kinds) > 1 else session.scalar(others.where(kind.not_in(kinds)).limit(1))
    if kinds and other is not None:
        raise ConflictError(
            "slots of several hosts need a GPU type of their own, on which all have as many GPUs:"
            f" '{join.gpu_type}' has other slots on node '{other}'",
            param="gpu_type",
        )


def _give_up(session: Session, present: Node, join: Join, slots: Sequence[Slot]) -> tuple[str, ...]:
    """Stop what no longer fits on the node. Its instances must be of its region and GPU type, which none can change."""
    live = instances_of(session, present.name)
    if live and (present.region, present.gpu_type) != (join.region, join.gpu_type):
        raise ConflictError(
            f"node '{join.node}' holds {len(live)} instances as {present.region}/{present.gpu_type};"
            f" drain it before it joins as {join.region}/{join.gpu_type}",
            param="region",
        )
    lost = _misfits(live, slots)
    if lost:
        touch_generations(session, [present.name])
        end_leases(session, lost, LeaseEnd.LOST)
        set_desired(session, lost, Desired.STOPPED)
    return lost


def _misfits(live: Sequence[Instance], slots: Sequence[Slot]) -> tuple[str, ...]:
    """Instances, oldest first, whose slot was removed, has no worker of their size, is of several hosts and of another
    size, or is full with older ones.
    """
    free = {slot.index: slot.gpus for slot in slots}
    most = {slot.index: slot.gpus // slot.workers for slot in slots}
    whole = {slot.index for slot in slots if slot.hosts is not None and slot.hosts > 1}
    lost = []
    for instance in live:
        at = instance.slot
        fits = at in free and instance.gpus <= min(most[at], free[at])
        if not fits or (at in whole and instance.gpus != most[at]):
            lost.append(instance.id)
        else:
            free[at] -= instance.gpus
    return tuple(lost)


def _is_as_before(session: Session, node: Node, offered: Mapping[str, Any], slots: Sequence[Slot]) -> bool:
    if any(getattr(node, name) != value for name, value in offered.items()):
        return False
    rows = session.scalars(select(Slot).where(Slot.node == node.name).order_by(Slot.index))
    return [snapshot(row) for row in rows] == [snapshot(slot) for slot in slots]
