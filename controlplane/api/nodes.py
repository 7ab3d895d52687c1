"""The node API: nodes join, send heartbeats, and receive their desired instances."""

import contextlib
import ipaddress
import socket
import time
from typing import TypeVar
from urllib.parse import urlsplit

import anyio.to_thread
import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from controlplane.api.admin.fields import NODE_NAME
from controlplane.api.admin.problems import PROBLEMS
from controlplane.api.auth import NodeCaller, needs
from controlplane.api.credentials import Caller
from controlplane.api.state import State, StateDep
from controlplane.errors import InvalidValueError, PermissionDeniedError, UnavailableError
from controlplane.planner.schedule import enqueue
from controlplane.store.fleet import touch_node
from controlplane.store.instances import desired_of, observe
from controlplane.store.joining import join_node
from controlplane.store.keys import record, snapshot
from controlplane.store.redis.live import NodeView, of_instances
from controlplane.store.tables import Node, Role
from controlplane.store.terms import note_reported
from dataplane.protocol.joining import Join
from dataplane.protocol.messages import DesiredInstances, Heartbeat

T = TypeVar("T")
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
router = APIRouter(prefix="/node", tags=["nodes"], dependencies=[Depends(needs(Role.NODE))], responses=PROBLEMS)


@router.post("/join", summary="A node introduces itself", openapi_extra=_BODY)
async def join(request: Request, state: StateDep, caller: NodeCaller) -> Response:
    """Body: `dataplane.protocol.joining.Join`. Answers the node's desired instances."""
    message = _decoded(await request.body(), Join)
    _check_own(caller, message.node, state)
    if not NODE_NAME.fullmatch(message.node):
        raise InvalidValueError("node: 1 to 200 characters, none of them '/' or a control character", param="node")
    _check_url(message.url)
    return _encoded(await run_in_threadpool(_join, state, message, caller.name))


@router.post("/heartbeat", summary="What a node sees", openapi_extra=_BODY)
async def heartbeat(request: Request, state: StateDep, caller: NodeCaller) -> Response:
    """Body: `dataplane.protocol.messages.Heartbeat`. Answers the node's desired instances; 404 asks it to join first.

    The desired instances are in Postgres: without Redis the node receives them as well. Without Postgres it does not,
    but the live view stays fresh, so that requests are still routed to the node.
    """
    message = _decoded(await request.body(), Heartbeat)
    _check_own(caller, message.node, state)
    renewed = None
    with contextlib.suppress(UnavailableError):
        renewed = await anyio.to_thread.run_sync(state.live.renew_heartbeat, message, limiter=state.beats.redis)
    writing = state.beats.writing
    if message.node in writing:
        raise UnavailableError(f"the last heartbeat of node '{message.node}' still waits for the database")
    writing.add(message.node)
    try:
        return _encoded(
            await anyio.to_thread.run_sync(_heartbeat, state, message, renewed, limiter=state.beats.postgres)
        )
    finally:
        writing.remove(message.node)


def _check_own(caller: Caller, node: str, state: State) -> None:
    """A node's key is for its node alone; a key without a node is for a stack on one machine (`node_keys_unbound`)."""
    if caller.node is None and not state.settings.node_keys_unbound:
        raise PermissionDeniedError("the key is for no node; make one with `tidepool key create --role node --node`")
    if caller.node not in {None, node}:
        raise PermissionDeniedError(f"the key is for node '{caller.node}', not for '{node}'", param="node")


def _check_url(url: str) -> None:
    """Refuse urls that requests, with the key for nodes, must not be sent to, such as a cloud's metadata service.

    Raises:
        InvalidValueError: it is no http(s) url, or of a link-local, multicast or unspecified address.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidValueError(f"url: '{url}' is no url: {error}", param="url") from error
    if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
        raise InvalidValueError(f"url: '{url}' is not http(s)://HOST[:PORT][/PATH]", param="url")
    address = _address_of(host)
    if address is not None and (address.is_link_local or address.is_multicast or address.is_unspecified):
        raise InvalidValueError(f"url: {host} is a link-local, multicast or unspecified address", param="url")


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is, in any notation; None: it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # as 2852039166, or 0xa9.254.43518
        except (OSError, ValueError):
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _join(state: State, message: Join, actor: str) -> DesiredInstances:
    with state.database.transaction() as session:
        present = session.get(Node, message.node)
        before = None if present is None else snapshot(present)
        joined = join_node(session, message)
        after = msgspec.to_builtins(message)
        record(session, actor=actor, action="node.join", subject=joined.node.name, before=before, after=after)
        for instance_id in joined.lost:
            after = {"reason": f"node {message.node} came back with no place for it"}
            record(session, actor=actor, action="instance.lose", subject=instance_id, after=after)
        desired = desired_of(session, message.node)
    enqueue("scale")  # instances may wait for GPUs
    return desired


class _OlderTermError(UnavailableError):
    """A node has seen a newer term than this control plane's primary is in, so nothing of its heartbeat is written."""


def _heartbeat(state: State, message: Heartbeat, renewed: NodeView | None) -> DesiredInstances:
    try:
        return _write_heartbeat(state, message, renewed)
    except _OlderTermError:
        with state.database.transaction(replicated=False) as session:
            note_reported(session, message.term)
        raise


def _write_heartbeat(state: State, message: Heartbeat, renewed: NodeView | None) -> DesiredInstances:
    """Write the heartbeat; the live view gets only the reports of instances that the node is to host."""
    with state.database.transaction(replicated=False) as session:
        node = touch_node(session, message.node, leaving=message.leaving)
        observe(session, message)
        starts = message.generation == 0  # it has no desired state yet
        desired = desired_of(session, message.node, starts_s=int(time.time()) if starts else None)
        if message.term > desired.term:
            raise _OlderTermError(
                f"this control plane is in term {desired.term} of its primary; "
                f"node '{message.node}' has seen term {message.term}"
            )
        place = {"region": node.region, "gpu_type": node.gpu_type, "url": node.url}
    if message.leaving and desired.instances and not desired.handing_over:
        enqueue("scale")  # the node waits until its instances are started elsewhere
    own = {(instance.instance_id, instance.model.name) for instance in desired.instances}
    with contextlib.suppress(UnavailableError):
        state.live.write_heartbeat(of_instances(message, own), **place, renewed=renewed)
    return desired


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"not a valid {kind.__name__}: {error}") from error


def _encoded(desired: DesiredInstances) -> Response:
    return Response(msgspec.json.encode(desired), media_type="application/json")
