"""Models, their profiles on GPU types, and the endpoints that offer them in regions."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Query
from pydantic import BaseModel, Field

from controlplane.api.admin.changes import fleet_change
from controlplane.api.admin.fields import (
    After,
    Answer,
    FilterWord,
    Limit,
    ModelPath,
    OwnedAnswer,
    Owner,
    PageOf,
    page_of,
)
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import (
    EndpointChange,
    ModelChange,
    Objective,
    Profile,
)
from controlplane.planner.schedule import enqueue
from controlplane.policies.facts import Endpoint as EndpointKey
from controlplane.store import fleet, tables
from controlplane.store.endpoint_summary import count_instances
from controlplane.store.keys import snapshot
from controlplane.store.model_summaries import list_summaries
from controlplane.store.rows import list_rows, require
from controlplane.store.weights import require_fit

router = APIRouter(tags=["admin: models"], route_class=IdempotentRoute)


class Model(OwnedAnswer):
    """A registered model."""

    name: str = Field(examples=["Qwen/Qwen3-8B"])
    path: str = Field(examples=["/models/qwen3-8b"])
    architecture: str = Field(examples=["Qwen3ForCausalLM"])
    weights_bytes: int = Field(examples=[16_381_470_720])
    parameters: int | None = Field(examples=[8_190_735_360])
    kv_bytes_per_token: int = Field(examples=[147_456])
    context_tokens: int = Field(examples=[40_960])
    slo: dict[str, Objective] | None = Field(examples=[{"IW-F": {"ttft_s": 1.0, "tbt_s": 0.1}}])
    engine: str = Field(examples=["auto"])
    task: str = Field(examples=["generate"])
    tool_parser: str | None = Field(examples=["hermes"])
    reasoning_parser: str | None = Field(examples=["qwen3"])
    base: str | None = Field(examples=[None], description="the model to which it is a LoRA adapter")
    with_base: bool = Field(description="an adapter that the instances of its base serve too")
    created_at: datetime


class Unplaced(Answer):
    """Instances that are wanted and have no place. `gpu_type` null: any that the model has a profile on."""

    gpu_type: str | None
    count: int
    reason: str = Field(examples=["GPUs full in us-east: 0 of 8 H800 free, needs 1 in one slot"])


class Endpoint(OwnedAnswer):
    """A model in a region."""

    model: str
    region: str
    instances_min: int
    instances_max: int
    last_scaled_at: datetime | None
    unplaced: list[Unplaced] | None = Field(description="of the last run of scaling; null: all has its place")


class EndpointWithInstances(Endpoint):
    """An endpoint and what there is of it."""

    instances: dict[str, int] = Field(description="live ones by state", examples=[{"ready": 2, "loading": 1}])


class OwnedProfile(Profile):
    """What an instance of a model does on a GPU type, and what said so."""

    owner: str | None = Field(description="the fleet's file that made it; null: it was made by hand")


class ModelSummary(BaseModel):
    """A model over all its regions."""

    name: str = Field(examples=["Qwen/Qwen3-8B"])
    task: str = Field(examples=["generate"])
    engine: str = Field(examples=["auto"])
    weights_bytes: int = Field(examples=[16_381_470_720])
    context_tokens: int = Field(examples=[40_960])
    base: str | None = Field(examples=[None], description="the model to which it is a LoRA adapter")
    with_base: bool = Field(description="an adapter that the instances of its base serve too: these are not counted")
    endpoints: int = Field(description="regions that offer it")
    instances: dict[str, int] = Field(description="live ones by state", examples=[{"ready": 2, "loading": 1}])
    unplaced: int = Field(description="endpoints with instances that have no place")


@router.get("/model-summaries", summary="List models with their instances")
def list_model_summaries(
    session: SessionDep,
    state: StateDep,
    _: Viewer,
    words: Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$", description="a part of the name")] = "",
    region: FilterWord = None,
    base: FilterWord = None,
    shown: Annotated[
        Literal["unplaced", "failed", "loading", "ready", "none"] | None,
        Query(
            alias="state", description="those with such an instance; unplaced: one without a place; none: without any"
        ),
    ] = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[ModelSummary]:
    """Models by name, over their regions; with `region`, those that it offers, and their instances there; with `base`,
    the LoRA adapters of that model.
    """
    page = list_summaries(
        session,
        words=words,
        region=region,
        state=shown,
        base=base,
        alive_s=state.settings.heartbeat_stale_s,
        after=after,
        limit=limit,
    )
    data = [ModelSummary.model_validate(row, from_attributes=True) for row in page.rows]
    return PageOf(data=data, has_more=page.has_more, next=page.next)


@router.put("/models/{name:path}", summary="Register a model")
def put_model(
    name: ModelPath, change: ModelChange, session: SessionDep, caller: Operator, owner: Owner = None
) -> Model:
    """Another checkpoint under a name whose instances are alive is refused (409)."""
    with fleet_change(session, caller, "model.put", tables.Model, name, owner=owner):
        row = fleet.put_model(session, tables.Model(name=name, **change.model_dump()))
    return Model.model_validate(row)


@router.get("/models", summary="List models")
def list_models(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[Model]:
    """Models by name."""
    return page_of(Model, list_rows(session, tables.Model, after=after, limit=limit))


@router.get("/models/{name:path}", summary="One model")
def get_model(name: ModelPath, session: SessionDep, _: Viewer) -> Model:
    """A model."""
    return Model.model_validate(require(session, tables.Model, name, param="model"))


@router.put("/profiles", summary="Say what a model does on a GPU type")
def put_profile(profile: Profile, session: SessionDep, caller: Operator, owner: Owner = None) -> OwnedProfile:
    """Placement counts on these numbers; measure them at the SLO."""
    key = (profile.model, profile.gpu_type)
    with fleet_change(session, caller, "profile.put", tables.Profile, key, owner=owner):
        row = fleet.put_profile(session, tables.Profile(**profile.model_dump()))
    return OwnedProfile.model_validate(row)


@router.get("/profiles", summary="List profiles")
def list_profiles(
    session: SessionDep, _: Viewer, model: FilterWord = None, limit: Limit = 20, after: After = None
) -> PageOf[OwnedProfile]:
    """Profiles by model and GPU type."""
    return page_of(OwnedProfile, list_rows(session, tables.Profile, which={"model": model}, after=after, limit=limit))


@router.put("/endpoints", summary="Offer a model in a region")
def put_endpoint(
    change: EndpointChange,
    session: SessionDep,
    caller: Operator,
    after_commit: BackgroundTasks,
    owner: Owner = None,
) -> Endpoint:
    """Scaling and plans keep the number of instances within the limits. A model whose weights fit on no slot of the
    region is refused; where no node has joined yet, that is found out when one does, and said in the status.
    """
    if change.instances_max:
        require_fit(session, model=change.model, region=change.region)
    model, region, least, most = change.model, change.region, change.instances_min, change.instances_max
    with fleet_change(session, caller, "endpoint.put", tables.EndpointRow, (model, region), owner=owner):
        row = fleet.put_endpoint(session, model=model, region=region, minimum=least, maximum=most)
    after_commit.add_task(enqueue, "scale")
    return Endpoint.model_validate(row)


@router.get("/endpoints", summary="List endpoints")
def list_endpoints(
    session: SessionDep,
    state: StateDep,
    _: Viewer,
    model: FilterWord = None,
    region: FilterWord = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[EndpointWithInstances]:
    """Endpoints by model and region, with their live instances by state."""
    page = list_rows(session, tables.EndpointRow, which={"model": model, "region": region}, after=after, limit=limit)
    alive_s = state.settings.heartbeat_stale_s
    states = count_instances(session, alive_s=alive_s, models={row.model for row in page.rows})
    data = [
        EndpointWithInstances.model_validate(
            snapshot(row) | {"instances": states.get(EndpointKey(model=row.model, region=row.region), {})}
        )
        for row in page.rows
    ]
    return PageOf(data=data, has_more=page.has_more, next=page.next)
