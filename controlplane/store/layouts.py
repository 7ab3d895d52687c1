"""How the GPUs of nodes are grouped into slots: what is wanted, and the slots that there are on the way to it.

Plans and operators want layouts of nodes. What an operator wants is held: plans leave it until it is released.

The rows of a node's slots are what its agent follows. A block of GPUs changes in one transaction, when nothing is
wanted of its slots or drains there any more; whoever dies before or after it changes nothing about that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.policies.fit import why_too_small
from controlplane.store.fleet import bump_index
from controlplane.store.instances import LIVE, present_layout, touch_generations
from controlplane.store.keys import record
from controlplane.store.rows import require
from controlplane.store.tables import Instance, Node, Profile, Slot
from dataplane.protocol.layouts import Layout, advanced, check_layout, memory_like, slots_of


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A node some of whose slots were replaced by others."""

    node: str
    before: Layout
    after: Layout


def want_layout(session: Session, name: str, layout: Sequence[int], *, held: bool) -> Node:
    """Have a node's GPUs grouped like that. The fleet must be locked; `regroup` brings it about. `held`: an operator
    wants it.

    Raises:
        NotFoundError: the node is not registered.
        ConflictError: its agent does not regroup.
        InvalidValueError: it cannot be grouped like that.
    """
    node = require(session, Node, name, param="node")
    if not node.regroups:
        hosts = session.scalar(select(func.max(Slot.hosts)).where(Slot.node == name)) or 1
        if hosts > 1:
            raise ConflictError(f"node '{name}' has a slot of {hosts} hosts, which stays as it is", param="layout")
        raise ConflictError(
            f"node '{name}' does not regroup its GPUs; TIDEPOOL_AGENT_REGROUP=true lets it", param="layout"
        )
    present = present_layout(session, name)
    try:
        check_layout(layout, sum(present))
    except ValueError as error:
        raise InvalidValueError(f"layout: {error}", param="layout") from error
    wanted = None if tuple(layout) == present else list(layout)
    if wanted != node.layout or held != node.layout_held:
        bump_index(session)
        if wanted != node.layout:
            node.layout, node.layout_at = wanted, None if wanted is None else func.now()
            node.layout_chosen_at = func.now()
        node.layout_held = held
        session.flush()
        session.refresh(node)
    return node


def release_layout(session: Session, name: str) -> Node:
    """Let plans choose a node's layout again. It stays until one does. The fleet must be locked.

    Raises:
        NotFoundError: the node is not registered.
    """
    node = require(session, Node, name, param="node")
    if node.layout_held:
        bump_index(session)
        node.layout_held = False
        session.flush()
    return node


def want_planned(session: Session, plan_id: str, layouts: Iterable[Mapping[str, Any]], *, actor: str) -> None:
    """Have nodes grouped as a plan says, with an audit event for each. A node that is gone, regroups no more, has other
    GPUs now or is held by an operator stays as it is. The fleet must be locked.
    """
    for each in layouts:
        name, layout = each["node"], each["after"]
        node = session.get(Node, name)
        if node is None or not node.regroups or node.layout_held:
            continue
        if sum(present_layout(session, name)) != sum(layout):
            continue
        before = node.layout or list(present_layout(session, name))
        want_layout(session, name, layout, held=False)
        after = {"layout": layout, "plan": plan_id, "reason": each["reason"]}
        record(session, actor=actor, action="node.layout", subject=name, before={"layout": before}, after=after)


def as_planned(session: Session, layouts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of a plan's layouts those that nobody has changed or held since: a rollback takes these back."""
    found = []
    for each in layouts:
        node = session.get(Node, each["node"])
        if node is not None and not node.layout_held:
            present = node.layout or list(present_layout(session, node.name))
            found += [each] if present == each["after"] else []
    return found


def models_without_slot(session: Session, node: Node) -> list[str]:
    """Models that run on the GPU type of a node in its region, and for which no slot there will be large enough."""
    at_place = select(Node).where(Node.region == node.region, Node.gpu_type == node.gpu_type)
    wanted = {each.name: each.layout for each in session.scalars(at_place)}
    workers = select(Slot.node, Slot.gpus // Slot.workers).where(Slot.node.in_(wanted)).distinct()
    sizes = {size for layout in wanted.values() for size in layout or ()}
    sizes |= {size for name, size in session.execute(workers) if not wanted[name]}
    of_place = (Instance.region == node.region, Instance.gpu_type == node.gpu_type, LIVE)
    at_profile = (Profile.model == Instance.model) & (Profile.gpu_type == Instance.gpu_type)
    running = session.execute(
        select(Profile.model, Profile.gpus)
        .join(Instance, at_profile)
        .where(*of_place)
        .distinct()
        .order_by(Profile.model)
    )
    place = f"{node.gpu_type} in {node.region}"
    reasons = (why_too_small(model, gpus, sizes, place) for model, gpus in running)
    return [reason for reason in reasons if reason is not None]


def regroup(session: Session) -> list[Regrouped]:
    """Replace the slots of all blocks that are empty by those that are wanted. The fleet must be locked."""
    done = []
    for node in session.scalars(select(Node).where(Node.layout.is_not(None)).order_by(Node.name)):
        present, wanted = present_layout(session, node.name), tuple(node.layout or ())
        busy = set(session.scalars(select(Instance.slot).where(Instance.node == node.name, LIVE)))
        after = advanced(present, wanted, busy)
        if after != present:
            touch_generations(session, [node.name])
            _replace_slots(session, node.name, after)
            done.append(Regrouped(node=node.name, before=present, after=after))
        if after == wanted:
            node.layout = node.layout_at = None
    if done:
        bump_index(session)
        session.flush()
    return done


def slots_like(slot: Slot, layout: Iterable[int]) -> list[Slot]:
    """The slots of a node with such a layout, whose GPUs are like those of `slot`."""

    def memory(gpus: int, of_bytes: int) -> int:
        return memory_like(gpus, of_bytes=of_bytes, of_gpus=slot.gpus)

    return [
        Slot(
            node=slot.node,
            index=number,
            gpus=gpus,
            workers=1,
            hosts=slot.hosts,
            memory_bytes=memory(gpus, slot.memory_bytes),
            weights_bytes=None if slot.weights_bytes is None else memory(gpus, slot.weights_bytes),
        )
        for number, gpus in slots_of(tuple(layout)).items()
    ]


def _replace_slots(session: Session, node: str, layout: Layout) -> None:
    """Stopped instances of slots that go are deleted with them: the audit log keeps what it says of them."""
    rows = {slot.index: slot for slot in session.scalars(select(Slot).where(Slot.node == node))}
    wanted = slots_like(rows[0], layout)
    gone = rows.keys() - {slot.index for slot in wanted}
    session.execute(delete(Instance).where(Instance.node == node, Instance.slot.in_(gone)))
    session.execute(delete(Slot).where(Slot.node == node, Slot.index.in_(gone)))
    for slot in wanted:
        session.merge(slot)
