"""The demand that a plan is made for: forecasts, and fallbacks with a reason where there is none.

A series whose task was lost or is late is forecast here, the busiest first, up to limits in number and time, each in a
transaction of its own. The fallback of the others is their last forecast, else the highest minute of the last hour:
less accurate, but such a series is not taken for idle, and the plan gives the reason.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.orm import Session

from controlplane.planner.forecast import forecast_one, make_forecast, series_to_forecast
from controlplane.policies.demand import demand_to_plan
from controlplane.policies.facts import Endpoint
from controlplane.policies.placement.error_correlation import ERRORS_S, PeakErrors, peak_error
from controlplane.settings import Settings
from controlplane.store.demand import (
    IW,
    NIW,
    Forecast,
    last_forecasts,
    mean_demand,
    peak_demand,
    read_forecasts,
    read_outcomes,
)
from controlplane.store.session import Database
from controlplane.store.tables import Json

log = structlog.get_logger()
_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_FRESH_S = 1800
_LAST_FORECAST_S = 3 * _HOUR_S
_HEADROOM = 1.5
"""Factor on the highest known minute, where no forecast gives an upper quantile."""


@dataclass(frozen=True, kw_only=True)
class ExpectedSeries:
    """One endpoint's coming hour in tokens per second. `fallback`: why this is no forecast from the plan's origin."""

    endpoint: Endpoint
    forecaster: str
    peak_q50: float
    peak_upper: float
    path: tuple[float, ...]
    fallback: str | None = None

    @property
    def median_path(self) -> tuple[float, ...]:
        """The path at the median; it has the shape of the upper one."""
        share = min(1.0, self.peak_q50 / self.peak_upper) if self.peak_upper > 0 else 1.0
        return tuple(share * value for value in self.path)

    def record(self) -> Json:
        """The series as a plan stores it."""
        return {
            "model": self.endpoint.model,
            "region": self.endpoint.region,
            "forecaster": self.forecaster,
            "peak_q50": self.peak_q50,
            "peak_upper": self.peak_upper,
            "stand_in": self.fallback,
        }


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The coming hour. `demand`: per window, upper forecasts and the share of NIW; windows are of one length.
    `medians`: the same with median forecasts.
    """

    origin_s: int
    quantile: float
    series: tuple[ExpectedSeries, ...]
    demand: dict[Endpoint, tuple[float, ...]]
    medians: dict[Endpoint, tuple[float, ...]]

    def record(self) -> Json:
        """The forecasts as a plan stores them."""
        series = [each.record() for each in self.series]
        return {"origin_s": self.origin_s, "quantile": self.quantile, "series": series}


def expected_demand(
    database: Database, settings: Settings, *, now_s: float, origin_s: int | None, keep: bool = True
) -> Expected:
    """Upper forecasts for each window of the coming hour, plus beta of the NIW tokens of the past hour (6.3).

    Args:
        now_s: Unix time.
        origin_s: use the forecasts of that moment; None: the newest, if they are of the last half hour.
        keep: store the forecasts that are made here.
    """
    with database.transaction() as session:
        forecasts = read_forecasts(session, origin_s=origin_s, until_s=int(now_s))
        fresh = origin_s is not None or (forecasts and now_s - forecasts[0].origin_s <= _FRESH_S)
        if not fresh:
            forecasts = []
        at_s = forecasts[0].origin_s if forecasts else origin_s if origin_s is not None else int(now_s) // 60 * 60
        known = [_forecast(row, None) for row in forecasts]
        done = {each.endpoint for each in known}
        missing = [each for each in series_to_forecast(session, origin_s=at_s, settings=settings) if each not in done]
        recent = mean_demand(session, kind=IW, since_s=at_s - _HOUR_S, until_s=at_s) if missing else {}
    busiest = sorted(missing, key=lambda endpoint: (-recent.get(endpoint, 0.0), endpoint))
    made, lacking = _made_here(database, settings, busiest, at_s=at_s, keep=keep)
    with database.transaction() as session:
        series = (*known, *made, *_fallbacks(session, lacking, at_s=at_s))
        deferred = mean_demand(session, kind=NIW, since_s=at_s - _HOUR_S, until_s=at_s)
    paths = {each.endpoint: each.path for each in series}
    medians = {each.endpoint: each.median_path for each in series}
    return Expected(
        origin_s=at_s,
        quantile=settings.forecast_quantile,
        series=series,
        demand=demand_to_plan(paths, deferred, niw_share=settings.niw_demand_share),
        medians=demand_to_plan(medians, deferred, niw_share=settings.niw_demand_share),
    )


def past_errors(session: Session, *, until_s: int) -> PeakErrors:
    """The errors of the forecasts of the week until a Unix time, where the hour's peak is known."""
    errors: defaultdict[Endpoint, dict[int, float]] = defaultdict(dict)
    for row in read_outcomes(session, since_s=until_s - ERRORS_S, until_s=until_s):
        error = peak_error(row.peak_q50, row.peak_upper, row.actual_peak, row.quantile)
        if error is not None:
            errors[Endpoint(model=row.model, region=row.region)][row.origin_s // _HOUR_S] = error
    return errors


def _made_here(
    database: Database, settings: Settings, busiest: Sequence[Endpoint], *, at_s: int, keep: bool
) -> tuple[list[ExpectedSeries], dict[Endpoint, str]]:
    """Forecasts of the busiest endpoints, and why the others have none."""
    make = forecast_one if keep else make_forecast
    most, until_s = settings.plan_forecasts_max, time.monotonic() + settings.plan_forecasts_s
    made: list[ExpectedSeries] = []
    lacking = dict.fromkeys(busiest[most:], f"late, and over the {most} that a plan makes itself")
    for endpoint in busiest[:most]:
        if time.monotonic() > until_s:
            lacking[endpoint] = f"late, and over the {settings.plan_forecasts_s:g} s that a plan takes for them"
            continue
        try:
            with database.transaction(replicated=False) as session:
                made.append(_forecast(make(session, endpoint, origin_s=at_s, settings=settings), None))
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # a forecaster that fails on one series must not prevent the plan
            log.exception("no forecast", model=endpoint.model, region=endpoint.region)
            lacking[endpoint] = f"failed: {error}"
    if lacking:
        log.warning("plan without forecasts", series=len(lacking), of=len(busiest), origin_s=at_s)
    return made, lacking


def _fallbacks(session: Session, lacking: dict[Endpoint, str], *, at_s: int) -> list[ExpectedSeries]:
    if not lacking:
        return []
    earlier = last_forecasts(session, since_s=at_s - _LAST_FORECAST_S, before_s=at_s)
    hour = peak_demand(session, kind=IW, since_s=at_s - _HOUR_S, until_s=at_s)
    silent = lacking.keys() - earlier.keys() - hour.keys()
    day = peak_demand(session, kind=IW, since_s=at_s - _DAY_S, until_s=at_s) if silent else {}
    found = []
    for endpoint, why in sorted(lacking.items()):
        if endpoint in earlier:
            row = earlier[endpoint]
            found.append(
                _forecast(row, f"{why}; fallback: the forecast of {(at_s - row.origin_s) // 60} minutes before")
            )
            continue
        peak = hour.get(endpoint, day.get(endpoint, 0.0))
        span = "hour" if endpoint in hour else "day"
        words = f"fallback: the last {span}'s highest minute" if peak else "no demand in the last day"
        found.append(
            ExpectedSeries(
                endpoint=endpoint,
                forecaster="none",
                peak_q50=peak,
                peak_upper=_HEADROOM * peak,
                path=(_HEADROOM * peak,),
                fallback=f"{why}; {words}",
            )
        )
    return found


def _forecast(row: Forecast, fallback: str | None) -> ExpectedSeries:
    """The series of a forecast. As a fallback only its peak counts, since its path is another hour's."""
    return ExpectedSeries(
        endpoint=Endpoint(model=row.model, region=row.region),
        forecaster=row.forecaster,
        peak_q50=row.peak_q50,
        peak_upper=row.peak_upper,
        path=(row.peak_upper,) if fallback else tuple(row.path),
        fallback=fallback,
    )
