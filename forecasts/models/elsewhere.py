"""What a series that is new borrows from the same model in other regions: the shape of this hour, and its uncertainty.

Less than a day after its first demand a series knows nothing of the hour that comes, and too little of its own errors.
The demand for the same model elsewhere, summed, knows both at the same time of day.
"""

import numpy as np

from forecasts.models.baselines import DAY_S, level, scaled_to_peak, typical_hour
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings
from forecasts.windows import next_max, trailing_max

ELSEWHERE = "same model elsewhere"
NEW_S = DAY_S
"""A series with less known demand is new."""


def elsewhere_path(history: DemandSeries, like: DemandSeries, settings: ForecastSettings) -> FloatArray:
    """Half way, in logarithms, from the last hour's maximum to the level times what usually follows elsewhere.

    Returns:
        Shape (windows,).

    Args:
        history: the new series.
        like: the demand elsewhere, in the same buckets, up to the same moment.
        settings: see ForecastSettings.

    Raises:
        ForecastError: either lacks data then, or there was no demand elsewhere.
    """
    path = level(history) * typical_hour(like, settings)
    return scaled_to_peak(path, float(np.sqrt(path.max() * history.last_hour_max())))


def borrowed_headroom(like: DemandSeries, settings: ForecastSettings) -> float | None:
    """The quantile of "next hour's peak over the last hour's maximum" elsewhere in the last day, at least 1; None where
    fewer than half of its hours are known.
    """
    hour = like.buckets_in(3600.0)
    after, before = next_max(like.values, settings.windows), trailing_max(like.values, hour)
    moments = np.arange(len(like.values) - settings.windows, hour - 1, -hour)[:24]
    usable = moments[~np.isnan(after[moments]) & (before[moments] > 0)]
    if len(usable) < 12:
        return None
    return max(settings.headroom, float(np.quantile(after[usable] / before[usable], settings.quantile)))
