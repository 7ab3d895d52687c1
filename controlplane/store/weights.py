"""Weights and the memory for them, from rows to the facts of `policies.fit`."""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError
from controlplane.policies.fit import ModelSize, WeightsMemory, why_unfit
from controlplane.store.rows import require
from controlplane.store.tables import Model, Node, Profile, Slot


def size_of(model: Model) -> ModelSize:
    """A model's weights."""
    return ModelSize(weights_bytes=model.weights_bytes, parameters=model.parameters)


def sizes_of(models: Iterable[Model]) -> dict[str, ModelSize]:
    """The weights of models, by name."""
    return {model.name: size_of(model) for model in models}


def weights_memory(node: Node, slot: Slot) -> WeightsMemory:
    """What a slot has for weights."""
    return WeightsMemory(weights_bytes=slot.weights_bytes, dtype=node.dtype)


def require_fit(session: Session, *, model: str, region: str) -> None:
    """Let a model pass that fits on some slot of the region, as far as is known; also where no node has joined yet.
    GPU types without a profile of the model are left out, unless it has none at all.

    Raises:
        InvalidValueError: its weights fit on none; the message gives MiB and what to change.
        NotFoundError: the model is not registered.
    """
    size = size_of(require(session, Model, model, param="model"))
    profiled = set(session.scalars(select(Profile.gpu_type).where(Profile.model == model)))
    rows = session.execute(select(Node, Slot).join(Slot, Slot.node == Node.name).where(Node.region == region))
    memories = [
        (node.gpu_type, weights_memory(node, slot)) for node, slot in rows if not profiled or node.gpu_type in profiled
    ]
    reason = why_unfit(model, size, memories, region)
    if reason is not None:
        raise InvalidValueError(reason, param="model")
