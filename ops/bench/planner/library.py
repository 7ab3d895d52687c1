"""The forecast of hourly peaks against models of a well-kept library, statsforecast, which is none of Tidepool's
dependencies: it runs in an environment of its own. `python -m ops.bench.planner.library --help`.

Both forecast the same hours, the second half of each series, from what was known then. The library's models are fitted
anew each hour on the peaks of all hours before; an hour without data counts as its predecessor there. Errors are
weighted errors of the hourly peak. What adding a model could gain is bounded by the hours on which it is nearer.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from forecasts.backtests import CHAMPION, HOUR_S, Prediction, run_backtests, scores_of, window_s
from forecasts.importers.series_file import EndpointSeries
from forecasts.selection.combination import COMBINATION
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings
from forecasts.zoo import HELD_OUT_KINDS, KINDS
from ops.bench.planner import library_peaks
from ops.bench.planner.forecast_zoo import generated
from ops.bench.planner.forecasts import recorded
from ops.bench.shared import chosen
from ops.client.screen import AsJson, Columns, notes, print_json, print_table

INSTALL = "python3 -m venv /tmp/statsforecast && /tmp/statsforecast/bin/pip install statsforecast"
FIRST_SEED = 1000


class LibraryError(Exception):
    """The library is not installed there, or its models could not run."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One series. Errors are shares of 1. `alone`: of each single forecaster here. `library`: of each model there.
    `nearer`: the share of the hours on which it was nearer to the peak than the champion. `failures`: its hours whose
    last peak was taken instead; `seconds`: of all its hours.
    """

    series: str
    hours: int
    error: float
    alone: dict[str, float]
    library: dict[str, float]
    nearer: dict[str, float]
    failures: dict[str, int]
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.library, key=lambda name: self.library[name])

    @property
    def to_library(self) -> float:
        """The champion's error over that of the library's best model, known in hindsight only."""
        return self.error / self.library[self.best]

    @property
    def single_to_library(self) -> float:
        """The error of the best single forecaster here, known in hindsight only, over that."""
        return min(self.alone.values()) / self.library[self.best]


def hourly_peaks(series: DemandSeries, first_s: float) -> tuple[FloatArray, int]:
    """The peaks of whole hours up to the series' end, hours without data as those before them; the number of the hour
    that begins at `first_s`.
    """
    windows = series.rebin(window_s(series.bucket_s))
    per_hour = round(HOUR_S / windows.bucket_s)
    skipped = round((first_s - windows.start_s) / windows.bucket_s) % per_hour
    values = windows.values[skipped:]
    hours = values[: len(values) // per_hour * per_hour].reshape(-1, per_hour)
    peaks = np.where(np.isnan(hours).all(axis=1), np.nan, np.nan_to_num(hours).max(axis=1))
    known = np.maximum.accumulate(np.where(np.isnan(peaks), 0, np.arange(len(peaks))))
    first = round((first_s - windows.start_s - skipped * windows.bucket_s) / HOUR_S)
    return np.nan_to_num(peaks[known]), first


def library_forecasts(python: Path, asked: Sequence[tuple[FloatArray, int]]) -> list[dict[str, Any]]:
    """What the library's models say of each series, given its hourly peaks and the first hour to forecast.

    Raises:
        LibraryError: says how to install it.
    """
    given = json.dumps([{"peaks": peaks.tolist(), "first": first} for peaks, first in asked])
    try:
        run = subprocess.run([python, library_peaks.__file__], input=given, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise LibraryError(f"there is no {python}: {INSTALL}") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise LibraryError(f"{python} cannot run statsforecast ({last}): {INSTALL}") from error
    answers: list[dict[str, Any]] = json.loads(run.stdout)
    return answers


def compare(endpoint: EndpointSeries, settings: ForecastSettings, python: Path) -> Compared:
    """Both on one series.

    Raises:
        LibraryError: see `library_forecasts`.
    """
    (done,), _ = run_backtests([endpoint], settings, hours_max=None, progress=lambda *_: None)
    champion = [one for one in done.predictions if one.forecaster == CHAMPION]
    peaks, first = hourly_peaks(endpoint.series, champion[0].origin_s)
    (answer,) = library_forecasts(python, [(peaks, first)])
    errors = {score.forecaster: score.error for score in scores_of(done.predictions, settings.quantile, {})}
    error = errors.pop(CHAMPION)
    assert error is not None, "a series without demand has no error"
    actual, ours, places = _judged(champion)
    given = {name: np.array(found["peaks"])[places] for name, found in answer.items()}
    return Compared(
        series=endpoint.name,
        hours=len(actual),
        error=error,
        alone={name: one for name, one in errors.items() if one is not None and name != COMBINATION},
        library={name: float(np.abs(values - actual).sum() / actual.sum()) for name, values in given.items()},
        nearer={
            name: float((np.abs(values - actual) < np.abs(ours - actual)).mean()) for name, values in given.items()
        },
        failures={name: found["failures"] for name, found in answer.items()},
        seconds={name: found["seconds"] for name, found in answer.items()},
    )


def _judged(champion: Sequence[Prediction]) -> tuple[FloatArray, FloatArray, list[int]]:
    """Of the hours with an outcome: the peak, the champion's forecast, and the hour's number from the first one."""
    known = [one for one in champion if one.actual is not None]
    places = [round((one.origin_s - champion[0].origin_s) / HOUR_S) for one in known]
    return np.array([one.actual for one in known]), np.array([one.peak_q50 for one in known]), places


def main(
    *,
    python: Annotated[Path, typer.Option(help=f"An interpreter with statsforecast: {INSTALL}")],
    data: Annotated[Path | None, typer.Option(help="Add the five recorded series: the folder of recordings.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Of the zoo's kinds; all if none is named.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="How many series of each kind.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Errors of the champion, of the best single forecaster here, and of statsforecast's models, series by series.

    \b
    Example:
      python -m ops.bench.planner.library --python /tmp/statsforecast/bin/python --data DATA --json
    """
    kinds = chosen(kind, (*KINDS, *HELD_OUT_KINDS), "--kind")
    work = [] if data is None else recorded(data, held_out=False)
    work += [endpoint for _, endpoint in generated(kinds, range(FIRST_SEED, FIRST_SEED + seeds))]
    rows = []
    try:
        library_forecasts(python, [])
        for endpoint in work:
            rows.append(compare(endpoint, ForecastSettings(), python))
            notes().print(
                f"{rows[-1].series}: {rows[-1].error:.1%}, {rows[-1].best} {rows[-1].library[rows[-1].best]:.1%}"
            )
    except LibraryError as error:
        raise typer.BadParameter(str(error), param_hint="--python") from error
    if as_json:
        print_json([_record(row) for row in rows])
        return
    print_table("Weighted errors of the hourly peak", columns_of(rows), [_record(row) for row in rows])


def columns_of(rows: Sequence[Compared]) -> Columns:
    """Errors, and on how many of the hours each of the library's models is nearer than the champion."""
    names = list(rows[0].library) if rows else []
    return {
        "series": "series",
        "hours": "hours",
        "champion": lambda row: f"{row['error']:.1%}",
        "best alone": lambda row: f"{min(row['alone'].values()):.1%}",
        **{name: _percent("library", name) for name in names},
        **{f"{name} nearer": _percent("nearer", name) for name in names},
        "champion to library's best": lambda row: f"{row['to_library']:.2f}x",
        "best alone to it": lambda row: f"{row['single_to_library']:.2f}x",
    }


def _percent(figure: str, name: str) -> Any:
    return lambda row: f"{row[figure][name]:.1%}"


def _record(row: Compared) -> dict[str, Any]:
    return {
        **asdict(row), "best": row.best, "to_library": row.to_library, "single_to_library": row.single_to_library
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
