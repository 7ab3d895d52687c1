"""Forecast one series at a time, from the demand before the origin."""

from dataclasses import asdict

from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.demand import (
    IW,
    Forecast,
    drop_forecast_states,
    endpoints_with_demand,
    put_forecasts,
    read_demand,
    read_demand_elsewhere,
    read_forecast_state,
)
from forecasts.models.elsewhere import NEW_S
from forecasts.selection.select import forecast_peak
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings

_MINUTE_S = 60
_KEEP_STATES_S = 6 * 3600


def series_to_forecast(session: Session, *, origin_s: int, settings: Settings) -> list[Endpoint]:
    """Endpoints with any demand in the history before the origin."""
    since_s = origin_s - settings.forecast_history_s
    return endpoints_with_demand(session, kind=IW, since_s=since_s, until_s=origin_s)


def forecast_one(session: Session, endpoint: Endpoint, *, origin_s: int, settings: Settings) -> Forecast:
    """Forecast the peak of the hour after `origin_s` for one endpoint, and store it."""
    forecast = make_forecast(session, endpoint, origin_s=origin_s, settings=settings)
    put_forecasts(session, [forecast])
    drop_forecast_states(session, endpoint, before_s=origin_s - _KEEP_STATES_S)
    return forecast


def make_forecast(session: Session, endpoint: Endpoint, *, origin_s: int, settings: Settings) -> Forecast:
    """The same, not stored.

    The state of the previous forecast (its choice, parameters and past errors) is passed on, so that not every hour
    chooses again; the same origin forecast again starts from the same state and gives the same result.
    """
    since_s = origin_s - settings.forecast_history_s
    rows = read_demand(session, kind=IW, since_s=since_s, until_s=origin_s, only=endpoint).get(endpoint, [])
    series = DemandSeries.from_rows(rows, bucket_s=_MINUTE_S, end_s=origin_s)
    state = read_forecast_state(session, endpoint, before_s=origin_s)

    how = ForecastSettings(quantile=settings.forecast_quantile, origins_max=settings.forecast_origins_max)
    peak = forecast_peak(series, how, state, _elsewhere(session, endpoint, series))
    return Forecast(
        model=endpoint.model,
        region=endpoint.region,
        origin_s=origin_s,
        forecaster=peak.forecaster,
        peak_q50=peak.peak_q50,
        peak_upper=peak.peak_upper,
        quantile=settings.forecast_quantile,
        path=list(peak.windows_upper),
        candidates={candidate.forecaster: asdict(candidate) for candidate in peak.candidates}
        | {name: {"forecaster": name, "declined": why} for name, why in peak.declined.items()},
        state=dict(peak.state),
        reason=peak.reason,
    )


def _elsewhere(session: Session, endpoint: Endpoint, series: DemandSeries) -> DemandSeries | None:
    """The demand for the model in other regions in the last two days, for a series that is new; else None."""
    if series.duration_s >= NEW_S:
        return None
    since_s, until_s = int(series.end_s - 2 * NEW_S), int(series.end_s)
    rows = read_demand_elsewhere(session, endpoint, since_s=since_s, until_s=until_s)
    return DemandSeries.from_rows(rows, bucket_s=_MINUTE_S, end_s=series.end_s) if rows else None
