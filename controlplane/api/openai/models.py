"""`GET /v1/models`: what can be asked for."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from controlplane.api.auth import Client, may_use, require_model
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import StateDep
from controlplane.serving.fleet_cache import FleetCache, ModelState
from controlplane.store.tables import Model
from dataplane.protocol.messages import Task

_STATES: tuple[ModelState, ...] = ("ready", "starting", "none")
_OUTPUT: dict[Task, str] = {"generate": "text", "embed": "embedding", "score": "score"}
router = APIRouter(prefix="/v1/models", tags=["models"], responses=ERRORS)


@router.get("", summary="List models")
async def list_models(state: StateDep, caller: Client) -> dict[str, Any]:
    """Every alias, and every registered model, that the key may use."""
    fleet = state.fleet
    named = {model.name: [model] for model in fleet.models()} | {
        name: fleet.models_of(name) for name in fleet.aliases()
    }
    data = [_model(name, models, fleet) for name, models in sorted(named.items()) if may_use(caller, name)]
    return {"object": "list", "data": data}


@router.get("/{name:path}", summary="Retrieve a model")
async def get_model(name: str, state: StateDep, caller: Client) -> dict[str, Any]:
    """One model, or an alias."""
    require_model(caller, name)
    await state.fleet.asked(name)
    return _model(name, state.fleet.models_of(name), state.fleet)


def _model(name: str, models: Sequence[Model], fleet: FleetCache) -> dict[str, Any]:
    """`context_tokens` is what the model was made for, `max_model_len` (vLLM's name) what its instances take now; of an
    alias, what all of its models do. `state` is `none` where no instance is placed.
    """
    task = models[0].task
    return {
        "id": name,
        "object": "model",
        "created": min(int(model.created_at.timestamp()) for model in models),
        "owned_by": "tidepool",
        "task": task,
        "modalities": {"input": ["text"], "output": [_OUTPUT[task]]},
        "context_tokens": min(model.context_tokens for model in models),
        "max_model_len": min(fleet.context_tokens(model) for model in models),
        "state": min((fleet.state_of(model.name) for model in models), key=_STATES.index),
    }
