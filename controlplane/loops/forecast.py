"""Forecasting: one series at a time, from what was known before the origin."""

from dataclasses import asdict

from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.demand import IW, endpoints_with_demand, put_forecasts, read_demand
from controlplane.store.tables import Forecast
from forecasts.select import ForecastSettings, forecast_peak
from forecasts.series import DemandSeries

_MINUTE_S = 60


def series_to_forecast(session: Session, *, origin_s: int, settings: Settings) -> list[Endpoint]:
    """Endpoints with any demand in the history before the origin."""
    since_s = origin_s - settings.forecast_history_s
    return endpoints_with_demand(session, kind=IW, since_s=since_s, until_s=origin_s)


def forecast_one(session: Session, endpoint: Endpoint, *, origin_s: int, settings: Settings) -> Forecast:
    """Forecast the peak of the hour after `origin_s` for one endpoint, and write it down."""
    since_s = origin_s - settings.forecast_history_s
    rows = read_demand(session, kind=IW, since_s=since_s, until_s=origin_s, only=endpoint).get(endpoint, [])
    series = DemandSeries.from_rows(rows, bucket_s=_MINUTE_S, end_s=origin_s)
    peak = forecast_peak(series, ForecastSettings(quantile=settings.forecast_quantile))
    forecast = Forecast(
        model=endpoint.model,
        region=endpoint.region,
        origin_s=origin_s,
        forecaster=peak.forecaster,
        peak_q50=peak.peak_q50,
        peak_upper=peak.peak_upper,
        quantile=settings.forecast_quantile,
        path=list(peak.windows_upper),
        candidates={candidate.forecaster: asdict(candidate) for candidate in peak.candidates},
        reason=peak.reason,
    )
    put_forecasts(session, [forecast])
    return forecast
