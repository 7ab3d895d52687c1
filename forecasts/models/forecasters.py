"""All forecasters by name; which of them run is a setting."""

from collections.abc import Mapping

from forecasts.models.arima import ARIMA
from forecasts.models.baselines import LAST_HOUR, TYPICAL_SHAPE, YESTERDAY
from forecasts.models.forecaster import Forecaster
from forecasts.models.fourier_arima import FOURIER_ARIMA
from forecasts.models.peak_regression import DAILY_PEAKS, RECENT_PEAKS
from forecasts.models.theta import THETA
from forecasts.models.two_parts import TWO_PARTS

FORECASTERS: Mapping[str, Forecaster] = {
    forecaster.name: forecaster
    for forecaster in (
        LAST_HOUR,
        YESTERDAY,
        TYPICAL_SHAPE,
        RECENT_PEAKS,
        DAILY_PEAKS,
        ARIMA,
        FOURIER_ARIMA,
        THETA,
        TWO_PARTS,
    )
}
