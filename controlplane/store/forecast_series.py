"""How the forecasts of each series did, the worst first, and the hours of one series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, Float, Subquery, and_, cast, func, or_, select, true
from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.store.demand import Forecast

SeriesOrder = Literal["error", "coverage", "demand", "model"]
_OF_FORECAST = ("model", "region", "origin_s", "forecaster", "peak_q50", "peak_upper", "quantile")


@dataclass(frozen=True, kw_only=True)
class ForecastSeries:
    """The newest forecast of a series, in input tokens per second, and how its forecasts did over the `hours` whose
    demand is known. `coverage`: the share of these whose peak stayed at or under the upper quantile. `error`: the sum
    of |median - peak| over that of peaks; None without demand.
    """

    model: str
    region: str
    origin_s: int
    forecaster: str
    peak_q50: float
    peak_upper: float
    quantile: float
    hours: int
    coverage: float | None
    error: float | None


def read_series(
    session: Session, *, since_s: int, words: str, region: str | None, order: SeriesOrder, after: int, limit: int
) -> Sequence[ForecastSeries]:
    """Series of the newest round, from row `after` on, scored by forecasts with an origin from `since_s` on."""
    past = _outcomes(since_s)
    orders: dict[SeriesOrder, ColumnElement[float]] = {
        "error": past.c.error.desc().nulls_last(),
        "coverage": past.c.coverage.asc().nulls_last(),
        "demand": Forecast.peak_q50.desc(),
    }
    newest = select(func.max(Forecast.origin_s)).scalar_subquery()
    named = (column.icontains(words, autoescape=True) for column in (Forecast.model, Forecast.region))
    query = (
        select(
            *(getattr(Forecast, name) for name in _OF_FORECAST),
            func.coalesce(past.c.hours, 0).label("hours"),
            past.c.coverage,
            past.c.error,
        )
        .outerjoin(past, and_(past.c.model == Forecast.model, past.c.region == Forecast.region))
        .where(Forecast.origin_s == newest, or_(*named), true() if region is None else Forecast.region == region)
        .order_by(*([orders[order]] if order in orders else []), Forecast.model, Forecast.region)
        .offset(after)
        .limit(limit)
    )
    return [ForecastSeries(**row) for row in session.execute(query).mappings()]


def _outcomes(since_s: int) -> Subquery:
    """Hours, coverage and error of each series."""
    covered = func.count().filter(Forecast.actual_peak <= Forecast.peak_upper)
    missed, came = func.sum(func.abs(Forecast.peak_q50 - Forecast.actual_peak)), func.sum(Forecast.actual_peak)
    return (
        select(
            Forecast.model,
            Forecast.region,
            func.count().label("hours"),
            (cast(covered, Float) / func.count()).label("coverage"),
            (missed / func.nullif(came, 0.0)).label("error"),
        )
        .where(Forecast.origin_s >= since_s, Forecast.actual_peak.is_not(None))
        .group_by(Forecast.model, Forecast.region)
        .subquery()
    )


def read_hours(session: Session, endpoint: Endpoint, *, since_s: int) -> Sequence[Forecast]:
    """The forecasts of one series with an origin from `since_s` on, the oldest first."""
    query = select(Forecast).where(
        Forecast.model == endpoint.model, Forecast.region == endpoint.region, Forecast.origin_s >= since_s
    )
    return session.scalars(query.order_by(Forecast.origin_s)).all()
