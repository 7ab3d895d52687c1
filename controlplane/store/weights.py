"""Weights and the memory for them, from rows to the facts of `policies.fit`."""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError
from controlplane.policies.fit import AdapterSize, ModelSize, WeightsMemory, why_unfit
from controlplane.store.rows import require
from controlplane.store.tables import Model, Node, Profile, Slot


def size_of(model: Model, base: Model | None = None) -> ModelSize:
    """A model's weights. `base`: that of a LoRA adapter."""
    if base is None:
        return ModelSize(weights_bytes=model.weights_bytes, parameters=model.parameters)
    adapter = AdapterSize(base=base.name, weights_bytes=model.weights_bytes)
    return ModelSize(weights_bytes=base.weights_bytes, parameters=base.parameters, adapter=adapter)


def sizes_of(models: Iterable[Model]) -> dict[str, ModelSize]:
    """The weights of models, by name; all bases of adapters are among them."""
    by_name = {model.name: model for model in models}
    return {name: size_of(model, by_name[model.base] if model.base else None) for name, model in by_name.items()}


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
    row = require(session, Model, model, param="model")
    size = size_of(row, None if row.base is None else session.get_one(Model, row.base))
    profiled = set(session.scalars(select(Profile.gpu_type).where(Profile.model == model)))
    rows = session.execute(select(Node, Slot).join(Slot, Slot.node == Node.name).where(Node.region == region))
    memories = [
        (node.gpu_type, weights_memory(node, slot)) for node, slot in rows if not profiled or node.gpu_type in profiled
    ]
    reason = why_unfit(model, size, memories, region)
    if reason is not None:
        raise InvalidValueError(reason, param="model")
