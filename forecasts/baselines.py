"""Forecasters without a fit. The maximum of the last hour is as good as ARIMA on many real series: the mark to beat."""

import numpy as np

from forecasts.series import DemandSeries, FloatArray

LAST_HOUR_MAX = "last hour's maximum"


def last_hour_max_path(history: DemandSeries, windows: int) -> FloatArray:
    """The maximum of the last hour with data, for each of the coming windows.

    Returns:
        Shape (windows,), tokens per second; NaN where nothing at all is known.
    """
    return np.full(windows, last_known_hour(history).maximum())


def last_known_hour(history: DemandSeries) -> DemandSeries:
    """The hour up to the newest known bucket; an empty series where nothing is known."""
    known = np.flatnonzero(~np.isnan(history.values))
    newest_end_s = history.start_s + (known[-1] + 1) * history.bucket_s if known.size else history.start_s
    return history.before(newest_end_s).last(3600.0)
