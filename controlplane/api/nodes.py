"""The node API: nodes join, send heartbeats, and are told what they shall hold."""

import contextlib
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from controlplane.api.admin.problems import PROBLEMS
from controlplane.api.auth import NodeCaller, needs
from controlplane.api.keys import Caller
from controlplane.api.state import State, StateDep
from controlplane.errors import InvalidValueError, PermissionDeniedError, UnavailableError
from controlplane.loops.schedule import enqueue
from controlplane.store.fleet import join_node, require, touch_node
from controlplane.store.instances import desired_of, observe
from controlplane.store.keys import record, snapshot
from controlplane.store.tables import Node, Role
from dataplane.messages import DesiredInstances, Heartbeat, Join

T = TypeVar("T")
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
router = APIRouter(prefix="/node", tags=["nodes"], dependencies=[Depends(needs(Role.NODE))], responses=PROBLEMS)


@router.post("/join", summary="A node introduces itself", openapi_extra=_BODY)
async def join(request: Request, state: StateDep, caller: NodeCaller) -> Response:
    """Body: `dataplane.messages.Join`. Answers what the node shall hold."""
    message = _decoded(await request.body(), Join)
    _check_own(caller, message.node, state)
    return _encoded(await run_in_threadpool(_join, state, message, caller.name))


@router.post("/heartbeat", summary="What a node sees", openapi_extra=_BODY)
async def heartbeat(request: Request, state: StateDep, caller: NodeCaller) -> Response:
    """Body: `dataplane.messages.Heartbeat`. Answers what the node shall hold; 404 asks it to join first."""
    message = _decoded(await request.body(), Heartbeat)
    _check_own(caller, message.node, state)
    return _encoded(await run_in_threadpool(_heartbeat, state, message))


def _check_own(caller: Caller, node: str, state: State) -> None:
    """A node's key speaks for its node alone; one of no node is for a stack on one machine (`node_keys_unbound`)."""
    if caller.node is None and not state.settings.node_keys_unbound:
        raise PermissionDeniedError("the key is for no node; make one with `tidepool key create --role node --node`")
    if caller.node not in {None, node}:
        raise PermissionDeniedError(f"the key is for node '{caller.node}', not for '{node}'", param="node")


def _join(state: State, message: Join, actor: str) -> DesiredInstances:
    with state.database.transaction() as session:
        present = session.get(Node, message.node)
        before = None if present is None else snapshot(present)
        node = join_node(session, message)
        after = msgspec.to_builtins(message)
        record(session, actor=actor, action="node.join", subject=node.name, before=before, after=after)
        desired = desired_of(session, message.node)
    enqueue("scale")  # new GPUs may be waited for
    return desired


def _heartbeat(state: State, message: Heartbeat) -> DesiredInstances:
    """Postgres has the truth: without Redis the node is told what it shall hold all the same. Without Postgres it is
    not, but the view is kept fresh, so that requests go on.
    """
    with contextlib.suppress(UnavailableError):
        state.live.renew_heartbeat(message)
    with state.database.transaction() as session:
        touch_node(session, message.node)
        node = require(session, Node, message.node, param="node")
        observe(session, message)
        desired = desired_of(session, message.node)
        place = {"region": node.region, "gpu_type": node.gpu_type, "url": node.url}
    with contextlib.suppress(UnavailableError):
        state.live.write_heartbeat(message, **place)
    return desired


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"not a valid {kind.__name__}: {error}") from error


def _encoded(desired: DesiredInstances) -> Response:
    return Response(msgspec.json.encode(desired), media_type="application/json")
