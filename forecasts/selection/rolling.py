"""Rolling origins: the forecasts at past times against the actual peaks.

The series is cut at each origin before the forecasters, the choice and the calibration use it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forecasts.selection.select import PeakForecast, forecast_peak
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings


class Rolled(NamedTuple):
    """A forecast at one origin, and the actual peak, tokens per second; None if the hour is a gap or not over."""

    forecast: PeakForecast
    actual: float | None


def rolling_origins(
    series: DemandSeries, settings: ForecastSettings, origins: Sequence[float], like: DemandSeries | None = None
) -> Iterator[Rolled]:
    """The forecast at each origin, with all candidates, and the actual peak.

    The first origin starts without a state, as a live series does; each forecast passes its state to the next.

    Args:
        series: the whole record, in buckets that divide `settings.bucket_s`.
        settings: `settings.forecasters` names the forecasters.
        origins: Unix times, ascending.
        like: demand for the same model elsewhere, in the same buckets.
    """
    state: Mapping[str, Any] | None = None
    for origin_s in origins:
        forecast = forecast_peak(series.before(origin_s), settings, state, like)
        state = forecast.state
        yield Rolled(forecast, _peak_after(series, origin_s, settings))


def _peak_after(series: DemandSeries, origin_s: float, settings: ForecastSettings) -> float | None:
    hour = series.before(origin_s + settings.horizon_s)
    if hour.end_s < origin_s + settings.horizon_s - 1e-6:
        return None
    peak = hour.last(settings.horizon_s).rebin(settings.bucket_s).maximum()
    return None if math.isnan(peak) else peak
