"""All forecasters by name; which of them run is a setting."""

from collections.abc import Mapping

from forecasts.models.baselines import LAST_HOUR, TYPICAL_SHAPE, YESTERDAY, YESTERDAYS_SHAPE
from forecasts.models.day_arima import ARIMA, FOURIER_ARIMA, SEASONAL_ARIMA
from forecasts.models.forecaster import Forecaster
from forecasts.models.peak_regression import DAILY_PEAKS, RECENT_PEAKS
from forecasts.models.theta import THETA

FORECASTERS: Mapping[str, Forecaster] = {
    forecaster.name: forecaster
    for forecaster in (
        LAST_HOUR,
        YESTERDAY,
        YESTERDAYS_SHAPE,
        TYPICAL_SHAPE,
        RECENT_PEAKS,
        DAILY_PEAKS,
        ARIMA,
        FOURIER_ARIMA,
        SEASONAL_ARIMA,
        THETA,
    )
}
