"""`GET /v1/models`: what can be asked for."""

from typing import Any

from fastapi import APIRouter

from controlplane.api.auth import Client, may_use, require_model
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import StateDep
from controlplane.serving.fleet_cache import FleetCache
from controlplane.store.tables import Model
from dataplane.protocol.messages import Task

_OUTPUT: dict[Task, str] = {"generate": "text", "embed": "embedding", "score": "score"}
router = APIRouter(prefix="/v1/models", tags=["models"], responses=ERRORS)


@router.get("", summary="List models")
async def list_models(state: StateDep, caller: Client) -> dict[str, Any]:
    """Every registered model that the key may use."""
    models = [model for model in state.fleet.models() if may_use(caller, model.name)]
    return {"object": "list", "data": [_model(model, state.fleet) for model in models]}


@router.get("/{name:path}", summary="Retrieve a model")
async def get_model(name: str, state: StateDep, caller: Client) -> dict[str, Any]:
    """One model."""
    model = await state.fleet.model(name)
    require_model(caller, model.name)
    return _model(model, state.fleet)


def _model(model: Model, fleet: FleetCache) -> dict[str, Any]:
    """`context_tokens` is what the model was made for, `max_model_len` (vLLM's name) what its instances take now.
    `state` is `none` where no instance is placed.
    """
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at.timestamp()),
        "owned_by": "tidepool",
        "task": model.task,
        "modalities": {"input": ["text"], "output": [_OUTPUT[model.task]]},
        "context_tokens": model.context_tokens,
        "max_model_len": fleet.context_tokens(model),
        "state": fleet.state_of(model.name),
    }
