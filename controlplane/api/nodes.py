"""The node API: nodes join, send heartbeats, and are told what they shall hold."""

import contextlib
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from controlplane.api.auth import NodeCaller, needs
from controlplane.api.state import State, StateDep
from controlplane.errors import InvalidValueError, UnavailableError
from controlplane.loops.schedule import enqueue
from controlplane.store.fleet import join_node, require, touch_node
from controlplane.store.instances import desired_of, observe
from controlplane.store.keys import record
from controlplane.store.tables import Node, Role
from dataplane.messages import DesiredInstances, Heartbeat, Join

T = TypeVar("T")
router = APIRouter(prefix="/node", tags=["nodes"], dependencies=[Depends(needs(Role.NODE))])


@router.post("/join", summary="A node introduces itself", openapi_extra={"requestBody": {"required": True}})
async def join(request: Request, state: StateDep, caller: NodeCaller) -> Response:
    """Body: `dataplane.messages.Join`. Answers what the node shall hold."""
    message = _decoded(await request.body(), Join)
    return _encoded(await run_in_threadpool(_join, state, message, caller.name))


@router.post("/heartbeat", summary="What a node sees", openapi_extra={"requestBody": {"required": True}})
async def heartbeat(request: Request, state: StateDep) -> Response:
    """Body: `dataplane.messages.Heartbeat`. Answers what the node shall hold; 404 asks it to join first."""
    message = _decoded(await request.body(), Heartbeat)
    return _encoded(await run_in_threadpool(_heartbeat, state, message))


def _join(state: State, message: Join, actor: str) -> DesiredInstances:
    with state.database.transaction() as session:
        node = join_node(session, message)
        record(session, actor=actor, action="node.join", subject=node.name, after=msgspec.to_builtins(message))
        desired = desired_of(session, message.node)
    enqueue("scale")  # new GPUs may be waited for
    return desired


def _heartbeat(state: State, message: Heartbeat) -> DesiredInstances:
    with state.database.transaction() as session:
        touch_node(session, message.node)
        node = require(session, Node, message.node, param="node")
        observe(session, message)
        desired = desired_of(session, message.node)
        place = {"region": node.region, "gpu_type": node.gpu_type, "url": node.url}
    with contextlib.suppress(
        UnavailableError
    ):  # Postgres has the truth: the node is told what it shall hold all the same
        state.live.write_heartbeat(message, **place)
    return desired


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"not a valid {kind.__name__}: {error}") from error


def _encoded(desired: DesiredInstances) -> Response:
    return Response(msgspec.json.encode(desired), media_type="application/json")
