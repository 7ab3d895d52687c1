"""The comparison with statsforecast, without it: what is asked of it, and how its answers are judged."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from forecasts.importers.series_file import EndpointSeries
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from ops.bench.planner import library, library_peaks
from ops.bench.planner.library import LibraryError, compare, hourly_peaks, library_forecasts

BARE = ForecastSettings(forecasters=(), origins_max=2)
CHEAT = """
import json, sys
print(json.dumps([
    {
        "knows": {"peaks": one["peaks"][one["first"]:], "seconds": 1.0, "failures": 0},
        "nothing": {"peaks": [0.0] * (len(one["peaks"]) - one["first"]), "seconds": 1.0, "failures": 2},
    }
    for one in json.load(sys.stdin)
]))
"""


def series(values: Any, start_s: float = 0.0) -> DemandSeries:
    return DemandSeries(start_s=start_s, bucket_s=300, values=np.asarray(values, dtype=np.float64))


def test_hours_are_those_of_the_forecast_and_gaps_are_as_the_hour_before() -> None:
    """Two buckets before the first whole hour; the second hour has one value, the third none."""
    hours = [[1.0] * 11 + [5.0], [np.nan] * 6 + [2.0] + [np.nan] * 5, [np.nan] * 12, [4.0] * 12]
    found = series([9.0, 9.0, *np.concatenate(hours), 7.0], start_s=3000.0)
    peaks, first = hourly_peaks(found, 3600.0 + 2 * 3600.0)
    assert peaks.tolist() == [5.0, 2.0, 2.0, 4.0]
    assert first == 2


def test_both_are_judged_on_the_same_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is told the peaks has no error, one that says nothing has one of 1; the champion is between."""
    script = tmp_path / "cheat.py"
    script.write_text(CHEAT)
    monkeypatch.setattr(library_peaks, "__file__", str(script))
    values = np.repeat([100.0] * 30 + [300.0] * 18, 12)
    found = compare(EndpointSeries(region="r", model="m", series=series(values)), BARE, Path(sys.executable))
    assert found.hours == 24
    assert found.library == {"knows": 0.0, "nothing": 1.0}
    assert found.error == pytest.approx(200 / (6 * 100 + 18 * 300))
    assert found.nearer == {"knows": pytest.approx(1 / 24), "nothing": 0.0}
    assert (found.best, found.failures["nothing"]) == ("knows", 2)
    nearer = library.columns_of([found])["knows nearer"]
    assert callable(nearer)
    assert nearer({"nearer": found.nearer}) == "4.2%"


def test_each_hour_is_forecast_from_the_hours_before_and_a_failure_is_the_last_peak() -> None:
    seen = []

    class Model:
        def forecast(self, *, y: Any, h: int) -> dict[str, list[float]]:
            seen.append((list(y), h))
            if len(y) == 3:
                raise ValueError("too short")
            return {"mean": [np.nan if len(y) == 4 else -1.0]}

    found = library_peaks.forecasts(Model, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 3)
    assert found["peaks"] == [3.0, 4.0, 0.0]
    assert found["failures"] == 2
    assert seen == [([1.0, 2.0, 3.0], 1), ([1.0, 2.0, 3.0, 4.0], 1), ([1.0, 2.0, 3.0, 4.0, 5.0], 1)]


def test_how_to_install_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="pip install statsforecast"):
        library_forecasts(tmp_path / "python", [])
    with pytest.raises(LibraryError, match=r"No module named 'statsforecast'.*pip install statsforecast"):
        library_forecasts(Path(sys.executable), [])
    app = Typer()
    app.command()(library.main)
    answer = CliRunner().invoke(app, ["--python", str(tmp_path / "python"), "--kind", "steady"])
    assert answer.exit_code == 2
    assert "statsforecast" in answer.output
