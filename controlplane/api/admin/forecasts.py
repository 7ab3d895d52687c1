"""Forecasts of the coming hour, with the forecaster and the reason for choosing it."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import TIME_S_MAX, Answer
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store.demand import read_forecasts

router = APIRouter(tags=["admin: forecasts"])


class Forecast(Answer):
    """One endpoint's coming hour, input tokens per second."""

    model: str
    region: str
    origin_s: int = Field(description="Unix time at which the hour begins", examples=[1_731_888_000])
    forecaster: str = Field(examples=["arima"])
    peak_q50: float = Field(description="the median peak", examples=[5200.0])
    peak_upper: float = Field(description="its upper quantile", examples=[7100.0])
    quantile: float = Field(examples=[0.9])
    path: list[Any] = Field(description="per 5 minutes")
    candidates: Any = Field(description="all that were tried")
    reason: str = Field(examples=["arima had the smallest error on the last 24 hours"])
    created_at: datetime


class Forecasts(BaseModel):
    """All forecasts of one origin."""

    origin_s: int | None = Field(description="null: nothing was forecast yet")
    data: list[Forecast]


@router.get("/forecasts", summary="Forecasts of one origin")
def list_forecasts(
    session: SessionDep,
    _: Viewer,
    origin_s: Annotated[int | None, Query(ge=0, le=TIME_S_MAX, description="none: the newest")] = None,
) -> Forecasts:
    """By model and region."""
    rows = read_forecasts(session, origin_s=origin_s, with_candidates=True)
    data = [Forecast.model_validate(row) for row in rows]
    return Forecasts(origin_s=data[0].origin_s if data else origin_s, data=data)
