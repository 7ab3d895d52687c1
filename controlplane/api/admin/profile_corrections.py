"""What plans take instances to do where that differs from the profiles, and why; and how long requests took, beside
what the profiles predict.
"""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, PageOf, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import GpuTypeName, ModelName
from controlplane.policies.facts import ModelGpu
from controlplane.store.keys import record, snapshot
from controlplane.store.latency_comparisons import comparisons
from controlplane.store.profile_corrections import corrections_in_force, reset_correction
from controlplane.store.rows import page

router = APIRouter(tags=["admin: models"], route_class=IdempotentRoute)


class Correction(Answer):
    """What plans take an instance to do, by what was observed of its model on its GPU type."""

    model: str = Field(examples=["Qwen/Qwen3-8B"])
    gpu_type: str = Field(examples=["H800"])
    stated_tokens_per_s: float = Field(description="by the profile", examples=[12_000.0])
    tokens_per_s: float = Field(description="what plans count with", examples=[10_320.0])
    factor: float = Field(description="of both", examples=[0.86])
    estimate: float | None = Field(description="by what was observed; null: that does not tell", examples=[10_290.0])
    windows: int = Field(description="of five minutes under load, in the last day", examples=[212])
    reason: str = Field(description="why it was changed in the last hour, or not")
    moved_at: datetime | None = Field(description="when it was last changed; null: never")
    prefill_factor: float = Field(description="on the times of prefills", examples=[1.12])
    decode_factor: float = Field(description="on the times of decode steps", examples=[0.97])
    steps_reason: str = Field(description="by what was observed of steps")
    steps_moved_at: datetime | None = Field(description="when these were last changed; null: never")
    corrected_at: datetime = Field(description="when this was decided")


class TierTimes(BaseModel):
    """First tokens of a tier, in seconds after the node had the request."""

    requests: int = Field(examples=[1_804])
    ttft_p50_s: float = Field(examples=[0.06])
    ttft_p95_s: float = Field(examples=[0.21])


class Latency(Answer):
    """The last hour's interactive requests of an endpoint on instances with GPUs of their own, and the times that the
    profile predicts for that load, as it is corrected.
    """

    model: str = Field(examples=["Qwen/Qwen3-8B"])
    region: str = Field(examples=["us-east"])
    gpu_type: str = Field(examples=["H800"])
    requests: int = Field(examples=[3_204])
    ttft_s: float = Field(description="mean, from when the node had a request to its first token", examples=[0.08])
    predicted_ttft_s: float | None = Field(
        description="null: nothing is predicted (the reason says why), or an instance cannot keep up", examples=[0.07]
    )
    tbt_s: float | None = Field(description="mean, between tokens; null: no answer had two", examples=[0.042])
    predicted_tbt_s: float | None = Field(description="null: as of predicted_ttft_s", examples=[0.021])
    batch: float | None = Field(description="that a request decoded in, by Little's law", examples=[14.2])
    prefill_share: float | None = Field(description="of the time, that prefills take by the profile", examples=[0.18])
    prompt_tokens: float = Field(description="mean of a prompt", examples=[1_020.0])
    context_tokens: float = Field(description="mean of a request while it decodes", examples=[1_180.0])
    tiers: dict[str, TierTimes]
    differs: bool = Field(description="whether the time between tokens is not what the profile says")
    reason: str = Field(description="what to make of it")
    compared_at: datetime


@router.get("/latency-comparisons", summary="Compare latency with what profiles predict")
def list_latency_comparisons(
    session: SessionDep, _: Viewer, model: FilterWord = None, limit: Limit = 20, after: After = None
) -> PageOf[Latency]:
    """By model, region and GPU type, as of the last hourly run, unless that was more than two hours ago. Endpoints
    without requests are left out.
    """
    return page_of(Latency, page(session, comparisons(model or None), after=after, limit=limit))


@router.get("/profile-corrections", summary="List corrections of profiles")
def list_corrections(
    session: SessionDep, state: StateDep, _: Viewer, model: FilterWord = None, limit: Limit = 20, after: After = None
) -> PageOf[Correction]:
    """Of the profiles that instances were observed of, by model and GPU type; none while the setting
    `profile_correction` is off.
    """
    if not state.settings.profile_correction:
        return PageOf(data=[], has_more=False, next=None)
    return page_of(Correction, page(session, corrections_in_force(model), after=after, limit=limit))


@router.delete("/profile-corrections", summary="Let a profile count as stated")
def delete_correction(
    model: Annotated[ModelName, Query()],
    gpu_type: Annotated[GpuTypeName, Query()],
    session: SessionDep,
    caller: Operator,
) -> Correction:
    """Forget its correction and what was observed. It is corrected anew when there is new evidence."""
    row = reset_correction(session, ModelGpu(model=model, gpu_type=gpu_type))
    before, answer = snapshot(row), Correction.model_validate(row)
    record(session, actor=caller.name, action="profile_correction.delete", subject=f"{model}|{gpu_type}", before=before)
    return answer
