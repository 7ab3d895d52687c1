"""LoRA adapters and their bases: what the two must agree in, and which adapters the instances of their bases serve."""

import hashlib
from collections.abc import Collection

from sqlalchemy import ColumnElement, Select, select, update
from sqlalchemy.orm import Session, aliased

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.store.rows import require
from controlplane.store.tables import Desired, EndpointRow, Instance, Model, Node
from dataplane.protocol.model_sources import is_remote

_SHARED = ("architecture", "kv_bytes_per_token", "context_tokens", "task")


def check_adapter(session: Session, model: Model, name: str) -> None:
    """Check that a model can be an adapter of the model `name`.

    Raises:
        NotFoundError: that is not registered.
        InvalidValueError: that is an adapter itself or does not generate; the two differ in what they share; or the
            adapter is remote.
    """
    base = require(session, Model, name, param="base")
    if base.name == model.name or base.base is not None:
        raise InvalidValueError(f"base: '{name}' is a LoRA adapter itself, or this model", param="base")
    if session.scalar(select(Model.name).where(Model.base == model.name).limit(1)) is not None:
        raise InvalidValueError(f"base: '{model.name}' is the base of adapters, and can be none itself", param="base")
    if base.task != "generate":
        raise InvalidValueError(f"base: '{name}' is for the task {base.task}; adapters generate", param="base")
    if is_remote(model.path):
        raise InvalidValueError(
            "path: an adapter is a folder that nodes can read; remote ones are not supported", param="path"
        )
    for field in _SHARED:
        mine, its = getattr(model, field), getattr(base, field)
        if mine != its:
            raise InvalidValueError(f"{field} must be that of the base '{name}', {its}, not {mine}", param=field)


def check_base(session: Session, present: Model, model: Model) -> None:
    """Check that a model that is registered anew remains one that its adapters fit.

    Raises:
        ConflictError: they have other sizes or another task, or instances of them run from its former path.
    """
    adapters = list(session.scalars(select(Model.name).where(Model.base == present.name).order_by(Model.name)))
    if not adapters:
        return
    for field in _SHARED:
        if getattr(present, field) != getattr(model, field):
            raise ConflictError(
                f"'{adapters[0]}' is an adapter of '{model.name}' with its present {field}", param=field
            )
    live = select(Instance.model).where(Instance.model.in_(adapters), Instance.desired != Desired.STOPPED).limit(1)
    if present.path != model.path and (using := session.scalar(live)) is not None:
        raise ConflictError(f"its adapter '{using}' has live instances on {present.path}", param="path")


def check_with_base(session: Session, present: Model | None, model: Model) -> None:
    """Check that the instances of its base can serve an adapter, whose base was checked, and that nobody uses it from
    another folder.

    Raises:
        InvalidValueError: it is no adapter.
        ConflictError: it is offered by itself, or instances of its base serve it from another path.
    """
    if model.base is None:
        raise InvalidValueError(
            "with_base: only a LoRA adapter, which has a base, is served with it", param="with_base"
        )
    offered = select(EndpointRow.region).where(EndpointRow.model == model.name).order_by(EndpointRow.region)
    if regions := list(session.scalars(offered)):
        raise ConflictError(
            f"'{model.name}' is offered by itself in {', '.join(regions)}: delete these endpoints first",
            param="with_base",
        )
    if present is None or not present.with_base or present.path == model.path:
        return
    if session.scalar(_hosts(model.base).limit(1)) is not None:
        raise ConflictError(f"model '{model.name}' is served from {present.path} by live instances", param="path")


def check_own_endpoint(model: Model) -> None:
    """Check that a model can be offered by itself.

    Raises:
        ConflictError: it is served with its base.
    """
    if model.with_base:
        raise ConflictError(
            f"'{model.name}' is served by the instances of '{model.base}', wherever that is offered", param="model"
        )


def tell_hosts(session: Session, base: str) -> None:
    """Tell the nodes of a model's live instances that the adapters which these shall serve have changed. The caller has
    locked the fleet.
    """
    hosts = _hosts(base).scalar_subquery()
    session.execute(update(Node).where(Node.name.in_(hosts)).values(generation=Node.generation + 1))


def _hosts(base: str) -> Select[str]:
    return select(Instance.node).where(Instance.model == base, Instance.desired != Desired.STOPPED)


def served_bases(session: Session) -> dict[str, str]:
    """The bases of the adapters that are served with them, by the adapter's name."""
    rows = session.execute(select(Model.name, Model.base).where(Model.with_base))
    return {name: base for name, base in rows if base is not None}


def serves_adapters() -> ColumnElement[bool]:
    """Whether the instances of a query's model serve adapters too."""
    adapter = aliased(Model)
    return Model.name.in_(select(adapter.base).where(adapter.with_base))


def served_with(session: Session, bases: Collection[str]) -> dict[str, list[Model]]:
    """The adapters that the instances of these models serve too, by the base, each in the order of names."""
    found: dict[str, list[Model]] = {}
    if not bases:
        return found
    query = select(Model).where(Model.with_base, Model.base.in_(bases)).order_by(Model.name)
    for adapter in session.scalars(query):
        found.setdefault(str(adapter.base), []).append(adapter)
    return found


def adapter_instance_id(host: str, adapter: Model) -> str:
    """How nodes and gateways call an adapter on the instance `host` of its base. Another folder under the same name, or
    the same folder registered anew, has another id: its node loads it when the former one has drained.
    """
    made = f"{adapter.path}@{adapter.created_at.timestamp()}"
    return f"{host}+{adapter.name}@{hashlib.blake2b(made.encode(), digest_size=4).hexdigest()}"
