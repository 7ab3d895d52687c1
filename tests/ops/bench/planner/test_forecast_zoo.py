"""The figures of forecasts on hard series."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forecasts.backtests import Prediction
from forecasts.importers.series_file import EndpointSeries
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from ops.bench.planner.forecast_zoo import HardResult, clients, generated, least_past_error, measure

BARE = ForecastSettings(forecasters=(), origins_max=2)
GOOD = HardResult(
    kind="shift",
    name="s",
    hours=80,
    error=0.1,
    alone={LAST_HOUR_MAX: 0.2, "a": 0.1},
    picked=0.1,
    below=0.9,
    coverage=0.9,
    pinball=0.02,
    forecast_cpu_s=0.01,
    cpu_s=1.0,
)


def endpoint(values: list[float]) -> EndpointSeries:
    series = DemandSeries(start_s=0, bucket_s=3600, values=np.array(values))
    return EndpointSeries(region="r", model="m", series=series)


def test_silence_is_covered_and_a_series_that_is_short_is_left_out() -> None:
    found = measure(("zeros", endpoint([0.0] * 160)), BARE, None)
    assert found is not None
    assert (found.hours, found.error, found.below, found.coverage, found.missed) == (80, None, 0, 1, ())
    assert measure(("zeros", endpoint([0.0] * 100)), BARE, None) is None


def test_figures_are_of_the_second_half() -> None:
    found = measure(("turns", endpoint([100.0, 300.0] * 80)), BARE, None)
    assert found is not None
    assert (found.hours, found.best) == (80, LAST_HOUR_MAX)
    assert found.alone[LAST_HOUR_MAX] == pytest.approx(1.0)
    assert found.forecast_cpu_s <= found.cpu_s


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, ()),
        ({"coverage": 0.84, "below": 0.84}, ("low coverage",)),
        ({"coverage": 1.0, "below": 0.96}, ("high coverage",)),
        ({"coverage": 1.0, "below": 0.5}, ()),
        ({"error": 0.106}, ("best single",)),
        ({"error": 0.22}, ("best single", "last hour")),
    ],
)
def test_what_is_missed_is_named(change: dict[str, float], missed: tuple[str, ...]) -> None:
    assert replace(GOOD, **change).missed == missed  # type: ignore[arg-type]


def test_the_rival_is_the_single_method_with_the_least_error_until_then() -> None:
    """Predictions of an hour have the champion's first, then the others by their error."""
    rows = [(0.0, "champion"), (0.0, "combination"), (0.0, "b"), (0.0, "a"), (1.0, "champion"), (1.0, "a"), (1.0, "b")]
    given = [Prediction(at_s, name, "combination", float(n), float(n), 1.0) for n, (at_s, name) in enumerate(rows)]
    assert [one.peak_q50 for one in least_past_error(given)] == [2, 5]
    assert GOOD.meets_errors(0.105)
    assert not GOOD.meets_errors(0.106)
    assert not replace(GOOD, alone={LAST_HOUR_MAX: 0.09}).meets_errors(0.1)


def test_every_client_is_a_series_of_its_own(tmp_path: Path) -> None:
    """Two clients with demand and one without; where all are at zero there is a gap."""
    folder = tmp_path / "servegen"
    folder.mkdir()
    rates = {"0": (1, 0, 0), "1": (0, 0, 0), "2": (2, 0, 3)}
    lines = [f"{client},{600 * n},{rate}" for client, row in rates.items() for n, rate in enumerate(row)]
    (folder / "m-small_clients.csv.gz").write_text("\n".join(["client_chunk,timestamp_s,rate_rps", *lines]) + "\n")
    found = {each.region: each.series.values.tolist() for _, each in clients(tmp_path, "m-small")}
    assert {region: [values[0], values[2]] for region, values in found.items()} == {"0": [1e3, 0], "2": [2e3, 3e3]}
    assert all(np.isnan(values[1]) for values in found.values())


def test_the_zoos_series_are_named_by_seed() -> None:
    assert [(kind, each.name) for kind, each in generated(["shift"], [3, 4])] == [
        ("shift", "shift in 3"),
        ("shift", "shift in 4"),
    ]
