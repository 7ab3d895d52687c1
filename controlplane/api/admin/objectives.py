"""How the tiers' objectives were kept over time."""

import time
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import TIME_S_MAX, Answer, FilterWord
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store.objectives import BUCKET_S, read_objectives

router = APIRouter(tags=["admin: fleet"])
_DAY_S = 86_400


class ObjectivePoint(Answer):
    """Answers of ten minutes and a tier, and their tokens."""

    start_s: int = Field(description="Unix time", examples=[1_731_283_200])
    tier: str = Field(examples=["IW-F"])
    answers: int = Field(description="also those that failed for lack of a working instance")
    kept: int = Field(description="those of the answers that kept both objectives")
    tokens: int
    tokens_in_time: int
    failed: int = Field(description="those of the answers that a fault of the service broke off or refused")


class ObjectiveSeries(BaseModel):
    """How objectives were kept since then. Ten minutes without an answer are left out."""

    model: str | None
    region: str | None
    since_s: int
    bucket_s: int = Field(examples=[BUCKET_S])
    data: list[ObjectivePoint]


@router.get("/objectives", summary="How objectives were kept over time")
def get_objectives(
    session: SessionDep,
    _: Viewer,
    model: FilterWord = None,
    region: FilterWord = None,
    since_s: Annotated[int | None, Query(ge=0, le=TIME_S_MAX, description="Unix time; none: a day ago")] = None,
) -> ObjectiveSeries:
    """By ten minutes and tier, the oldest first. Gateways add what they counted every 15 seconds; it is kept for 8
    days. Deferred requests have no objective but their deadline.
    """
    since_s = int(time.time()) - _DAY_S if since_s is None else since_s
    points = read_objectives(session, model=model or None, region=region or None, since_s=since_s)
    return ObjectiveSeries(
        model=model or None,
        region=region or None,
        since_s=since_s,
        bucket_s=BUCKET_S,
        data=[ObjectivePoint(start_s=start_s, tier=tier, **vars(kept)) for start_s, tier, kept in points],
    )
