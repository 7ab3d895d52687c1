"""The interface of forecasters: a name, a fit whose result can be kept as JSON, and a path over the coming windows.

Both get only the demand before the origin, so that no forecaster can use later values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings

Params = Mapping[str, Any]
Fit = Callable[[DemandSeries, ForecastSettings, Params | None], Params]
Path = Callable[[DemandSeries, Params, ForecastSettings], FloatArray]


class ForecastError(Exception):
    """This forecaster has no forecast here; the message, which plans show, says why."""


def no_fit(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    """The fit of a forecaster that keeps no parameters."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """One way to forecast the coming hour.

    Attributes:
        name: its name in plans.
        path: (history, params, settings) -> shape (settings.windows,), tokens per second; its maximum is the forecast
            peak. The caller clips it. Raises ForecastError.
        fit: (history, settings, old params or None) -> params, a JSON object. None: choose orders; else only refit.
            Raises ForecastError.
        mean_path: the path follows the mean, whose maximum is below the mean maximum; past ratios correct it.
        history_min_s: known demand it needs.
    """

    name: str
    path: Path
    fit: Fit = no_fit
    mean_path: bool = False
    history_min_s: float = 0.0
