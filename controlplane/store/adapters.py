"""LoRA adapters and their bases: what the two must agree in."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.store.rows import require
from controlplane.store.tables import Desired, Instance, Model
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
