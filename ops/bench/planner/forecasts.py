"""How good forecasts are on recorded weeks, and how long they take: `python -m ops.bench.planner.forecasts --help`.

Every hour of a series' second half is forecast from what was known then, by the champion and by each forecaster alone,
in one run. Over-provision compares at one coverage: the last hour's maximum is taken times the least factor, known with
hindsight only, that covers as many of these hours as the champion's upper quantile did, which is not scaled.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from forecasts.backtests import CHAMPION, Prediction, run_backtests, scores_of
from forecasts.importers.rates import read_azure_week, read_sageserve_week, read_servegen
from forecasts.importers.series_file import EndpointSeries
from forecasts.importers.settings import ImportSettings
from forecasts.models.arima import ArimaOrder, fit_order
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.models.forecaster import ForecastError
from forecasts.selection.select import forecast_peak
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import DEFAULT_FORECASTERS, ArimaSettings, ForecastSettings
from ops.client.screen import AsJson, notes, print_json, print_table

TABLE_METHODS = (
    LAST_HOUR_MAX,
    "same hour yesterday",
    "ARIMA",
    "Fourier + ARIMA",
    "Theta",
)
"""Of the table in `algorithms.md`, section 1, those that are here."""

SPEED_SERIES = 400
SPEED_NOISE = 0.05
GRID_SERIES = 4
PROCESSES = 2
COVERAGE = (0.87, 0.93)
LESS_THAN_LAST_HOUR = 0.75
FASTER_THAN_GRID = 20.0


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One series, second half; errors and over-provision as shares of 1.

    Attributes:
        error: champion's weighted error of the hourly peak.
        alone: the same of each forecaster alone.
        to_table_best: error over the smallest of `TABLE_METHODS`; to_best: over the smallest of all.
        coverage: of the champion's upper quantile.
        over_provision: of the champion's upper quantile, over the sum of peaks.
        last_hour_over_provision: of the last hour's maximum, scaled to cover as much.
    """

    series: str
    hours: int
    error: float
    alone: dict[str, float]
    to_table_best: float
    to_best: float
    coverage: float
    over_provision: float
    last_hour_over_provision: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds for all series with `PROCESSES` processes; `grid_s` is scaled up from `grid_few_s`."""

    series: int
    forecast_s: float
    grid_few_s: float
    grid_s: float
    faster: float


def recorded(data: Path, *, held_out: bool) -> list[EndpointSeries]:
    """The five series of the table, or others: ServeGen's clients by region, on which no setting was chosen, and
    SageServe's dev, which was looked at.

    Args:
        data: the folder with azure/, sageserve/ and servegen/.
        held_out: which.
    """
    sageserve = data / "sageserve" / "nov2024_week_prompt_tokens_per_min.csv.gz"
    if not held_out:
        azure = read_azure_week(data / "azure" / "azure2024_week_requests_10s_Coding.csv.gz")
        found = _series("Azure", azure, 300.0)
        found += _series("SageServe", read_sageserve_week(sageserve), 300.0)
        return found + _series("ServeGen", read_servegen(data / "servegen" / "rates_10min.csv.gz"), 600.0)
    found = _series("SageServe dev", read_sageserve_week(sageserve, ImportSettings(workload="dev")), 300.0)
    for model in ("m-small", "m-mid"):
        dealt = ImportSettings(model=model, regions=("a", "b", "c"), tokens_per_request=1000.0)
        rows = read_servegen(data / "servegen" / f"{model}_clients.csv.gz", dealt)
        found += _series("ServeGen clients", rows, 600.0)
    return found


def _series(where: str, rows: Any, bucket_s: float) -> list[EndpointSeries]:
    found: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for row in rows:
        found.setdefault((row.region, row.model), []).append((row.start_s, row.tokens_per_s))
    fine_s = min(60.0, bucket_s) if bucket_s == 300.0 else bucket_s
    return [
        EndpointSeries(region=f"{where} {region}", model=model, series=_binned(rows_of, fine_s, bucket_s))
        for (region, model), rows_of in sorted(found.items())
    ]


def _binned(rows: list[tuple[float, float | None]], fine_s: float, bucket_s: float) -> DemandSeries:
    """Whole buckets, counted from the first row."""
    fine = DemandSeries.from_rows(rows, bucket_s=fine_s)
    whole_s = fine.duration_s // bucket_s * bucket_s
    return fine.before(fine.start_s + whole_s).rebin(bucket_s)


def measure_accuracy(each: EndpointSeries, settings: ForecastSettings) -> Accuracy:
    """Forecast every hour of the second half of a series; the hours before teach."""
    began_s = time.monotonic()
    (done,), _ = run_backtests([each], settings, hours_max=None, progress=lambda *_: None)
    scores = {score.forecaster: score for score in scores_of(done.predictions, settings.quantile, done.costs)}
    errors = {name: score.error for name, score in scores.items() if score.error is not None}
    champion = scores[CHAMPION]
    alone = {name: error for name, error in errors.items() if name != CHAMPION}
    assert champion.coverage is not None
    assert champion.over_provision is not None
    return Accuracy(
        series=f"{each.region} {each.model}",
        hours=champion.hours,
        error=errors[CHAMPION],
        alone=alone,
        to_table_best=_ratio(errors[CHAMPION], min(alone[name] for name in TABLE_METHODS if name in alone)),
        to_best=_ratio(errors[CHAMPION], min(alone.values())),
        coverage=champion.coverage,
        over_provision=champion.over_provision,
        last_hour_over_provision=_scaled_last_hour(done.predictions, champion.coverage),
        seconds=time.monotonic() - began_s,
    )


def _ratio(error: float, best: float) -> float:
    return error / best if best else (1.0 if error == 0 else float("inf"))


def _scaled_last_hour(predictions: Sequence[Prediction], coverage: float) -> float:
    """Over-provision of the last hour's maximum times the least factor that covers this share of the hours."""
    rows = [
        (one.peak_q50, one.actual)
        for one in predictions
        if one.forecaster == LAST_HOUR_MAX and one.actual and one.peak_q50
    ]
    forecast, actual = np.array(rows).T
    factor = np.sort(actual / forecast)[max(0, round(coverage * len(rows)) - 1)]
    return float(np.maximum(0.0, forecast * factor - actual).sum() / actual.sum())


def measure_speed(weeks: Sequence[DemandSeries], settings: ForecastSettings, count: int = SPEED_SERIES) -> Speed:
    """Forecast noisy copies of recorded weeks one hour on, the state of the hour before given, and refit a few by grid.

    What is kept (orders, parameters, past errors) is that of the week a copy is of.
    """
    rng = np.random.default_rng(0)
    hour_before = [forecast_peak(week.before(week.end_s - settings.horizon_s), settings).state for week in weeks]
    work = []
    for number in range(count):
        week = weeks[number % len(weeks)]
        noisy = week.values * np.exp(rng.normal(0.0, SPEED_NOISE, len(week.values)))
        work.append((replace(week, values=noisy), settings, hour_before[number % len(weeks)]))
    with ProcessPoolExecutor(PROCESSES) as pool:
        list(pool.map(_forecast_one, work[:PROCESSES]))  # the first imports statsmodels
        began_s = time.monotonic()
        list(pool.map(_forecast_one, work, chunksize=20))
        forecast_s = time.monotonic() - began_s
        began_s = time.monotonic()
        list(pool.map(_fit_grid, [series.values for series, _, _ in work[:GRID_SERIES]]))
        grid_few_s = time.monotonic() - began_s
    grid_s = grid_few_s * len(work) / len(work[:GRID_SERIES])
    return Speed(series=count, forecast_s=forecast_s, grid_few_s=grid_few_s, grid_s=grid_s, faster=grid_s / forecast_s)


def _forecast_one(work: tuple[DemandSeries, ForecastSettings, Any]) -> float:
    series, settings, state = work
    return forecast_peak(series, settings, state).peak_upper


def _fit_grid(values: FloatArray) -> None:
    """Every ARIMA up to (3,1,3), exactly fitted: what choosing orders anew each hour would take."""
    bounds = ArimaSettings(iterations_max=50)
    for p in range(4):
        for d in range(2):
            for q in range(4):
                try:
                    fit_order(ArimaOrder(p=p, d=d, q=q), values, bounds)
                except ForecastError:
                    continue


def main(
    *,
    data: Annotated[Path, typer.Option(help="The folder with azure/, sageserve/ and servegen/.")],
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Other series than the table's, most never looked at.")
    ] = False,
    accuracy: Annotated[bool, typer.Option(help="Errors, coverage and over-provision.")] = True,
    speed: Annotated[bool, typer.Option(help="400 series of a week, against refits by grid.")] = True,
    as_json: AsJson = False,
) -> None:
    """Figures of the forecast on recorded weeks, and how long 400 series take.

    Example: python -m ops.bench.planner.forecasts --data ../shared/data --json > forecasts.json
    """
    settings = ForecastSettings()
    found = recorded(data, held_out=held_out)
    rows: list[Accuracy] = []
    for each in found if accuracy else []:
        rows.append(measure_accuracy(each, settings))
        notes().print(f"{rows[-1].series}: {rows[-1].seconds:.0f} s")
    weeks = [each.series for each in found if each.series.bucket_s == settings.bucket_s]
    timed = measure_speed(weeks, settings) if speed else None
    if as_json:
        print_json({"series": [asdict(row) for row in rows], "speed": asdict(timed) if timed else None})
        return
    _print(rows, timed)


def _print(rows: Sequence[Accuracy], timed: Speed | None) -> None:
    percent: Callable[[float], str] = "{:.1%}".format
    judged = [(row, missed_targets(row)) for row in rows]
    print_table(
        "Champion, second half of each series",
        {
            "series": "series",
            "hours": "hours",
            "error": lambda row: percent(row["error"]),
            "to table's best": lambda row: f"{row['to_table_best']:.2f}x",
            "to best alone": lambda row: f"{row['to_best']:.2f}x",
            "coverage": lambda row: percent(row["coverage"]),
            "over-provision": lambda row: percent(row["over_provision"]),
            "last hour's": lambda row: percent(row["last_hour_over_provision"]),
            "missed": "missed",
        },
        [{**asdict(row), "missed": misses or "-"} for row, misses in judged],
    )
    alone = [name for name in (*DEFAULT_FORECASTERS, "combination") if any(name in row.alone for row in rows)]
    print_table(
        "Weighted error alone",
        {"forecaster": "name", **{row.series: row.series for row in rows}},
        [{"name": n, **{row.series: percent(row.alone[n]) if n in row.alone else "-" for row in rows}} for n in alone],
    )
    if timed:
        title = f"{timed.series} series of a week, {PROCESSES} processes (target: {FASTER_THAN_GRID:g}x)"
        print_table(title, {name: name for name in ("forecast_s", "grid_few_s", "grid_s", "faster")}, [asdict(timed)])


def missed_targets(row: Accuracy) -> str:
    """Which targets of the issue this series misses."""
    found = []
    if row.to_table_best > 1.0:
        found.append("error")
    if row.error >= row.alone[LAST_HOUR_MAX]:
        found.append("last hour")
    if not COVERAGE[0] <= row.coverage <= COVERAGE[1]:
        found.append("coverage")
    if row.over_provision > LESS_THAN_LAST_HOUR * row.last_hour_over_provision:
        found.append("over-provision")
    return ", ".join(found)


if __name__ == "__main__":
    typer.run(main)
