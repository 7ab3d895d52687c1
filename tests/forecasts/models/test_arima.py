import numpy as np
import pytest
from statsmodels.tsa.statespace.sarimax import SARIMAX

from forecasts.models.arima import ArimaOrder, fit_arima, fit_order
from forecasts.models.forecaster import ForecastError
from forecasts.series import FloatArray
from forecasts.settings import ArimaSettings


def autoregression(length: int) -> FloatArray:
    rng = np.random.default_rng(5)
    values = np.full(length, 100.0)
    for index in range(2, length):
        values[index] = 100 + 0.9 * (values[index - 1] - 100) - 0.5 * (values[index - 2] - 100) + rng.normal(0, 5)
    return values


def test_the_shortlist_misses_little_of_what_the_whole_grid_would_find() -> None:
    values = autoregression(150)
    short = fit_arima(values, ArimaSettings(p_max=2))
    whole = fit_arima(values, ArimaSettings(p_max=2, exact_fits_max=99))
    assert short.aic - whole.aic < 2
    assert (short.order.p >= 2, short.order.d) == (True, 0)


def test_a_known_order_starts_from_its_old_parameters() -> None:
    """With no iteration at all, the parameters are those it was given."""
    values, order = autoregression(150), ArimaOrder(p=2, d=0, q=0)
    before = fit_order(order, values[:100], ArimaSettings())
    still = fit_order(order, values, ArimaSettings(iterations_max=0), start=before.params)
    assert still.params == pytest.approx(before.params, rel=1e-3)
    assert fit_order(order, values, ArimaSettings(), start=before.params).aic < still.aic


@pytest.mark.parametrize(
    ("values", "reason"),
    [([np.nan] * 50, "every bucket is a gap"), ([3.0] * 50, "constant"), ([1.0, 2.0, 1.0], "too few known points")],
)
def test_what_has_no_arima_says_why(values: list[float], reason: str) -> None:
    with pytest.raises(ForecastError, match=reason):
        fit_arima(np.array(values), ArimaSettings())


@pytest.mark.parametrize("order", [ArimaOrder(p=2, d=0, q=1), ArimaOrder(p=3, d=1, q=2), ArimaOrder(p=0, d=0, q=1)])
def test_the_path_is_the_librarys_forecast_gaps_or_not(order: ArimaOrder) -> None:
    values = autoregression(200)
    values[50:60] = np.nan
    fit = fit_order(order, values, ArimaSettings())
    model = SARIMAX(
        values / fit.scale, order=(order.p, order.d, order.q), trend=None if order.d else "c", concentrate_scale=True
    )
    expected = model.filter(fit.params).forecast(12) * fit.scale
    assert fit.path(values, 12) == pytest.approx(expected, rel=1e-6)
