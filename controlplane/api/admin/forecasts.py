"""Forecasts of the coming hour, with the forecaster and the reason for choosing it."""

import time
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import TIME_S_MAX, AfterId, Answer, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.policies.facts import Endpoint
from controlplane.store.demand import read_forecasts
from controlplane.store.forecast_series import SeriesOrder, read_hours, read_series

router = APIRouter(tags=["admin: forecasts"])
_HOUR_S = 3600
_NAME = r"^[^\x00]*$"
Hours = Annotated[int, Query(ge=1, le=31 * 24, description="of how many past hours")]


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


class Series(Answer):
    """A series: its newest forecast, and how its forecasts did."""

    model: str
    region: str
    origin_s: int = Field(description="Unix time at which the forecast hour begins", examples=[1_731_888_000])
    forecaster: str = Field(description="the champion", examples=["arima"])
    peak_q50: float = Field(description="the median peak, input tokens per second", examples=[5200.0])
    peak_upper: float = Field(description="its upper quantile", examples=[7100.0])
    quantile: float = Field(examples=[0.9])
    hours: int = Field(description="forecasts whose hour is over and measured")
    coverage: float | None = Field(description="share of these whose peak stayed at or under the upper quantile")
    error: float | None = Field(description="sum of |median - peak| over the sum of peaks", examples=[0.21])


@router.get("/forecasts/series", summary="How forecasts did, by series")
def list_series(
    session: SessionDep,
    _: Viewer,
    order: Annotated[SeriesOrder, Query(description="the worst or largest first; or by name")] = "error",
    words: Annotated[str, Query(max_length=200, pattern=_NAME, description="a part of model or region")] = "",
    region: FilterWord = None,
    hours: Hours = 24,
    limit: Limit = 50,
    after: AfterId = None,
) -> PageOf[Series]:
    """Those that the newest round forecast."""
    first = after or 0
    rows = read_series(
        session,
        since_s=int(time.time()) - (hours + 1) * _HOUR_S,
        words=words,
        region=region,
        order=order,
        after=first,
        limit=limit + 1,
    )
    more = len(rows) > limit
    return PageOf(
        data=[Series.model_validate(row) for row in rows[:limit]],
        has_more=more,
        next=str(first + limit) if more else None,
    )


class ForecastHour(Answer):
    """One forecast of a series, and what came."""

    origin_s: int
    forecaster: str
    peak_q50: float
    peak_upper: float
    quantile: float
    actual_peak: float | None = Field(description="null: that hour is not over, or was not measured whole")
    reason: str


class ForecastHours(BaseModel):
    """The forecasts of a series, the oldest first."""

    data: list[ForecastHour]


@router.get("/forecasts/hours", summary="Forecasts of one series, and what came")
def list_hours(
    session: SessionDep,
    _: Viewer,
    model: Annotated[str, Query(min_length=1, max_length=300, pattern=_NAME)],
    region: Annotated[str, Query(min_length=1, max_length=300, pattern=_NAME)],
    hours: Hours = 168,
) -> ForecastHours:
    """One row an hour; empty for a series that nobody forecast."""
    rows = read_hours(session, Endpoint(model=model, region=region), since_s=int(time.time()) - (hours + 1) * _HOUR_S)
    return ForecastHours(data=[ForecastHour.model_validate(row) for row in rows])
