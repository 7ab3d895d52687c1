"""Nodes: the registered ones, their instances and last heartbeats, and draining one."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field, computed_field
from sqlalchemy.orm import Session

from controlplane.api.admin.changes import fleet_change
from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, NodePath, PageOf
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.admin.instances import Instance, instances_shown
from controlplane.api.auth import Operator, Viewer
from controlplane.api.credentials import Caller
from controlplane.api.state import SessionDep, State, StateDep
from controlplane.declarations import Body
from controlplane.errors import UnavailableError
from controlplane.planner.schedule import enqueue
from controlplane.policies.lifecycle import NodeState
from controlplane.store import fleet, layouts, tables
from controlplane.store.instances import count_of_nodes, instances_of
from controlplane.store.keys import snapshot
from controlplane.store.redis.live import NodeView
from controlplane.store.rows import require
from dataplane.protocol.version import tidepool_version

router = APIRouter(tags=["admin: fleet"], route_class=IdempotentRoute)


class Slot(Answer):
    """GPUs of a node that serve as one. `memory_bytes` is their memory together."""

    index: int
    gpus: int
    workers: int = Field(description="worker processes that share the GPUs; a model must fit on those of one")
    memory_bytes: int
    weights_bytes: int | None = Field(description="of these for weights, on each worker; null: its agent does not say")
    hosts: int | None = Field(
        description="that the GPUs are of; of more than one they serve one model at a time, on all of them; null: its"
        " agent does not say"
    )


class Node(Answer):
    """A machine with GPUs of one type."""

    name: str = Field(examples=["node-us-east-1"])
    region: str = Field(examples=["us-east"])
    gpu_type: str = Field(examples=["H800"])
    url: str = Field(examples=["http://10.0.0.7:9000"])
    engine: str = Field(examples=["torch"])
    state: NodeState = Field(
        description="alive, draining or leaving: it was heard of lately; lost: it was not, and is missed; silent: it"
        " was not, since it was drained, shut down in order or never heard of"
    )
    draining: bool = Field(description="an operator takes it out of service")
    leaving: bool = Field(description="its agent is shutting down")
    alive: bool = Field(description="whether it was heard of lately")
    generation: int = Field(description="rises with every change of what it shall hold")
    last_seen_at: datetime | None
    host_bytes: int | None = Field(description="host memory for models; null: its agent does not say")
    dtype: str | None = Field(
        examples=["bfloat16"],
        description="what weights are converted to; null: they stay as stored, or it does not say",
    )
    version: str | None = Field(description="Tidepool's on the node; null: its agent does not say")
    engine_version: str | None = Field(description="of torch or vLLM there; null: a replay, or its agent does not say")
    regroups: bool = Field(description="whether its GPUs may be grouped into other slots")
    layout: list[int] | None = Field(
        examples=[[4, 1, 1, 2]],
        description="GPUs of each slot that is wanted, in the order of its GPUs; null: it is grouped as wanted",
    )
    layout_at: datetime | None = Field(description="since when that is wanted")
    layout_held: bool = Field(description="an operator chose its slots, and plans leave them")
    layout_chosen_at: datetime | None = Field(description="when its slots were last chosen; null: it joined with them")
    slots: list[Slot]

    @computed_field(description="its version is known, and not this gateway's")  # type: ignore[prop-decorator]
    @property
    def version_differs(self) -> bool:
        return self.version is not None and self.version != tidepool_version()


class OtherHost(Answer):
    """A host but the first of a slot whose GPUs are of several, as the node's last heartbeat says."""

    slot: int
    host: int = Field(description="its number, from 1: the `--rank` of its `tidepool node follow`")
    hostname: str | None = Field(description="null: its follower has not reported yet")
    connected: bool = Field(description="whether its follower reports")
    silent_s: float | None = Field(description="since its follower reported; null: it has not yet")
    refusal: str | None = Field(description="why the agent refused its last report, if it did")


class NodeRow(Node):
    """A node and how many instances it has."""

    instances_live: int = Field(description="that are wanted or still draining")
    instances_leaving: int = Field(description="of these, those that drain")
    other_hosts: list[OtherHost] | None = Field(description="of its slots; null: it was not heard of lately")


class InstanceLive(Answer):
    """What the node's last heartbeat said of an instance."""

    instance_id: str
    slot: int
    state: str
    kv_used_bytes: int
    kv_capacity_bytes: int
    remaining_tokens: int
    running: int
    waiting: int
    error: str | None


class NodeLive(Answer):
    """A node's last heartbeat."""

    age_s: float
    boot_id: str
    generation: int = Field(description="the generation it follows")
    switches_total: int
    instances: list[InstanceLive]
    other_hosts: list[OtherHost] = Field(description="of its slots whose GPUs are of several hosts")


class NodeDetail(Node):
    """A node with what is wanted of it and what it says."""

    instances: list[Instance]
    live: NodeLive | None = Field(description="null: nothing was heard for ten minutes, or `live_error` says why")
    live_error: str | None = Field(description="why the live view could not be read")


@router.get("/nodes", summary="List nodes")
def list_nodes(
    session: SessionDep,
    state: StateDep,
    _: Viewer,
    words: Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$", description="a part of the name")] = "",
    region: FilterWord = None,
    gpu_type: FilterWord = None,
    shown: Annotated[NodeState | None, Query(alias="state", description="only nodes in this state")] = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[NodeRow]:
    """Nodes by name, with the number of their live instances."""
    which = {"region": region, "gpu_type": gpu_type}
    alive_s = state.settings.heartbeat_stale_s
    page = fleet.list_nodes(session, words=words, which=which, state=shown, alive_s=alive_s, after=after, limit=limit)
    counts = count_of_nodes(session, [row.name for row in page.rows])
    nodes = _nodes(session, state, page.rows)
    hosts = _other_hosts(state, nodes)
    data = [
        NodeRow(
            **dict(node),
            instances_live=counts.get(node.name, (0, 0))[0],
            instances_leaving=counts.get(node.name, (0, 0))[1],
            other_hosts=hosts[node.name],
        )
        for node in nodes
    ]
    return PageOf(data=data, has_more=page.has_more, next=page.next)


@router.get("/nodes/{name}", summary="One node, with its instances and its last heartbeat")
def get_node(name: NodePath, session: SessionDep, state: StateDep, _: Viewer) -> NodeDetail:
    """What the control plane wants of the node (`instances`), and what the node says (`live`)."""
    row = require(session, tables.Node, name, param="node")
    wanted = instances_shown(session, instances_of(session, name), alive_s=state.settings.heartbeat_stale_s)
    live, error = _live(state, [name])
    node = _nodes(session, state, [row])[0]
    return NodeDetail(**dict(node), instances=wanted, live=live.get(name), live_error=error)


@router.post("/nodes/{name}/drain", summary="Take a node out of service")
def drain_node(name: NodePath, session: SessionDep, state: StateDep, caller: Operator) -> Node:
    """Nothing new is placed on the node and plans do not count its GPUs. Its instances are started elsewhere where
    there is room, and drained here once their successors are ready; those without room elsewhere serve on.
    """
    return _set_draining(session, state, caller, name, draining=True)


@router.post("/nodes/{name}/undrain", summary="Put a node back into service")
def undrain_node(name: NodePath, session: SessionDep, state: StateDep, caller: Operator) -> Node:
    """The node may be given instances again."""
    return _set_draining(session, state, caller, name, draining=False)


class LayoutBody(Body):
    """How a node's GPUs are to be grouped."""

    layout: list[Annotated[int, Field(ge=1, le=64)]] = Field(
        min_length=1,
        max_length=64,
        examples=[[4, 1, 1, 2]],
        description="GPUs of each slot, in the order of the GPUs: 1, 2, 4, 8, ..., each from a multiple of its size on",
    )


class NodeRegrouped(Node):
    """A node whose layout was chosen."""

    warnings: list[str] = Field(
        examples=[["llama-70b takes 4 GPUs together, the largest slot of H800 in us-east has 2"]],
        description="models that run on GPUs of its type in the region, and for which no slot is large enough then",
    )


@router.put("/nodes/{name}/layout", summary="Group the GPUs of a node into slots")
def set_layout(
    name: NodePath, body: LayoutBody, session: SessionDep, state: StateDep, caller: Operator
) -> NodeRegrouped:
    """The node must let its GPUs be regrouped (`regroups`). Slots that both layouts have stay as they are. Instances on
    the others are started elsewhere where there is room, and drained; where there is none, they are drained after
    `regroup_patience_s`. GPUs are regrouped when all slots that go are empty; until then `layout` is what is wanted,
    `slots` what is. Plans pool no models on a GPU type whose slots differ in size, and leave this node's layout from
    then on.
    """
    with fleet_change(session, caller, "node.layout", tables.Node, name):
        row = layouts.want_layout(session, name, body.layout, held=True)
    enqueue("scale")
    node = _nodes(session, state, [row])[0]
    return NodeRegrouped(**dict(node), warnings=layouts.models_without_slot(session, row))


@router.delete("/nodes/{name}/layout", summary="Leave the layout of a node to plans")
def release_layout(name: NodePath, session: SessionDep, state: StateDep, caller: Operator) -> Node:
    """Ends an operator's choice. The slots stay until a plan regroups them, which it does with `TIDEPOOL_PLAN_LAYOUTS`
    only.
    """
    with fleet_change(session, caller, "node.layout", tables.Node, name):
        row = layouts.release_layout(session, name)
    return _nodes(session, state, [row])[0]


def _set_draining(session: Session, state: State, caller: Caller, name: str, *, draining: bool) -> Node:
    action = "node.drain" if draining else "node.undrain"
    with fleet_change(session, caller, action, tables.Node, name):
        row = fleet.set_node_draining(session, name, draining=draining)
    return _nodes(session, state, [row])[0]


def _nodes(session: Session, state: State, rows: Sequence[tables.Node]) -> list[Node]:
    names = [row.name for row in rows]
    slots = fleet.slots_of(session, names)
    states = fleet.node_states(session, names, alive_s=state.settings.heartbeat_stale_s)
    nodes = []
    for row in rows:
        of_node = [Slot.model_validate(slot) for slot in slots[row.name]]
        shown = states[row.name]
        alive = shown not in {NodeState.SILENT, NodeState.LOST}
        nodes.append(Node.model_validate(snapshot(row) | {"state": shown, "alive": alive, "slots": of_node}))
    return nodes


def _live(state: State, names: Iterable[str]) -> tuple[dict[str, NodeLive], str | None]:
    """The last heartbeats of nodes, by name, or why there are none."""
    try:
        view = state.live.read_view()
    except UnavailableError as error:
        return {}, error.message
    known = {name: view.nodes[name] for name in names if name in view.nodes}
    return {name: _heard(node, max(0.0, view.read_s - node.received_s)) for name, node in known.items()}, None


def _heard(node: NodeView, age_s: float) -> NodeLive:
    beat = node.heartbeat
    return NodeLive(
        age_s=age_s,
        boot_id=beat.boot_id,
        generation=beat.generation,
        switches_total=beat.switches_total,
        instances=[InstanceLive.model_validate(report) for report in beat.instances],
        other_hosts=[OtherHost.model_validate(host) for host in beat.hosts],
    )


def _other_hosts(state: State, nodes: Sequence[Node]) -> dict[str, list[OtherHost] | None]:
    """By node; None: what its last heartbeat said may be true no more. The live view is read only where a slot is of
    several hosts.
    """
    spanning = [node.name for node in nodes if any((slot.hosts or 1) > 1 for slot in node.slots)]
    live = _live(state, spanning)[0] if spanning else {}
    fresh = {name: node for name, node in live.items() if node.age_s <= state.settings.heartbeat_stale_s}
    found: dict[str, list[OtherHost] | None] = {node.name: [] for node in nodes}
    return found | {name: fresh[name].other_hosts if name in fresh else None for name in spanning}
