"""`forecast backtest`: how well the forecasters would have done on a file of demand."""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ops.cli.examples import examples
from ops.cli.forecast_import import reading, replaced
from ops.client.api import CommandError
from ops.client.screen import Columns, notes, print_json, print_table, progress_bar, same, time_text

if TYPE_CHECKING:
    from forecasts.backtests import Cost, SeriesBacktest
    from forecasts.settings import ForecastSettings
    from ops.plots.forecast_plot import ForecastPanel, ReliabilityPanel

INTERRUPTED = 130


@examples(
    "tidepool forecast backtest demand.csv",
    "tidepool forecast backtest demand.csv --origins 48 --predictions predictions.csv --plot backtest.png",
)
def backtest_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="CSV; packed by gzip or not.")],
    quantile: Annotated[float, typer.Option(help="Of the hour's peak, to be covered: above 0.5, below 1.")] = 0.9,
    origins: Annotated[
        int | None,
        typer.Option(min=1, help="How many of the newest hours to forecast. Default: the second half of a series."),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every prediction to this CSV (.gz packs it).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw history, forecast and actual demand: .png, .svg or .pdf.")
    ] = None,
    forecaster: Annotated[
        list[str] | None, typer.Option(help="Try this one only, by name; may be given again. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON, and nothing else.")] = False,
) -> None:
    """Forecast the peak of every past hour of a file from the data before it, and compare with the actual peak.

    \b
    The file is a CSV with the columns start_s (Unix time), region, model, tokens_per_s, rows in any order. An empty
    value, or no row, is a gap. A series' buckets are as wide as the least time between two rows, and divide an hour.

    \b
    error           sum |peak - median forecast| / sum of peaks
    coverage        share of hours whose peak stayed within the upper quantile
    pinball         pinball loss of the upper quantile / mean peak: low where it covers and wastes little
    over-provision  sum of what the upper quantile was above the peak / sum of peaks
    at equal cover  the same, with all upper quantiles times the factor that gives exactly the coverage asked for
    champion        the forecast that the system would have used for each hour
    fit, forecast   seconds to choose and fit from nothing, and to forecast once; of the champion, of all in an hour

    \b
    Ctrl-C prints the results so far. Works without a running API.
    """
    done, interrupted = _run(file, _settings(quantile, forecaster), origins, predictions, plot)
    some = any(each.predictions for each in done)
    try:
        if predictions is not None:
            _write(predictions, done, quantile)
        if plot is not None and some:
            _draw(plot, done, file, quantile)
    finally:
        _show(_answer(file, quantile, done, interrupted=interrupted), as_json=as_json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not some:
        raise CommandError(f"{file}: no series has an hour to forecast")


def _run(
    file: Path, settings: "ForecastSettings", origins: int | None, predictions: Path | None, plot: Path | None
) -> "tuple[Sequence[SeriesBacktest], bool]":
    """Check the outputs, read the file, and run the backtests; the second value is whether they were interrupted."""
    from forecasts.backtests import run_backtests
    from forecasts.importers.lines import DemandFileError
    from forecasts.importers.series_file import read_series
    from ops.plots.panels import PlotError, check_path

    try:
        _check_predictions(predictions, file)
        if plot is not None:
            check_path(plot)
        with reading(file) as report:
            found = read_series(file, report)
        with _progress(len(found)) as progress:
            return run_backtests(found, settings, hours_max=origins, progress=progress)
    except (DemandFileError, PlotError, ValueError) as error:
        raise CommandError(str(error)) from error


def _settings(quantile: float, forecasters: list[str] | None) -> "ForecastSettings":
    from forecasts.models.forecasters import FORECASTERS
    from forecasts.settings import ForecastSettings

    for name in forecasters or ():
        if name not in FORECASTERS:
            raise CommandError(f"--forecaster: {name!r} is none of: {'; '.join(FORECASTERS)}")
    try:
        if not forecasters:
            return ForecastSettings(quantile=quantile)
        return ForecastSettings(quantile=quantile, forecasters=tuple(forecasters))
    except ValueError as error:
        raise CommandError(str(error)) from error


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str, int, int], None]]:
    """Progress over the hours of `count` series, one after the other."""
    names: dict[str, None] = {}
    with progress_bar("hours") as report:

        def report_series(name: str, done: int, total: int) -> None:
            names.setdefault(name)
            report(f"{name} ({len(names)} of {count} series)", done, total)

        yield report_series


def _check_predictions(path: Path | None, file: Path) -> None:
    """Check that they can be written before the long run."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise CommandError(f"{path}: the folder {path.absolute().parent} does not exist")
    if path.exists() and path.samefile(file):
        raise CommandError(f"--predictions {path} is the file to read")


def _upper_name(quantile: float) -> str:
    return f"peak_q{100 * quantile:g}"


def _write(path: Path, done: "Sequence[SeriesBacktest]", quantile: float) -> None:
    header = ("origin_s", "region", "model", "forecaster", "peak_q50", _upper_name(quantile), "actual_peak")
    with replaced(path) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        for each in done:
            for one in each.predictions:
                origin_s = int(one.origin_s) if one.origin_s == int(one.origin_s) else one.origin_s
                names = (each.endpoint.region, each.endpoint.model, one.forecaster)
                writer.writerow((origin_s, *names, one.peak_q50, one.peak_upper, one.actual))


def _answer(file: Path, quantile: float, done: "Sequence[SeriesBacktest]", *, interrupted: bool) -> dict[str, Any]:
    from forecasts.backtests import reliability_of, scores_of

    everything = [one for each in done for one in each.predictions]
    reliability = reliability_of(everything)
    return {
        "file": str(file),
        "quantile": quantile,
        "interrupted": interrupted,
        "seconds": sum(each.seconds for each in done),
        "reliability": None if reliability is None else asdict(reliability),
        "overall": [asdict(score) for score in scores_of(everything, quantile, _mean_costs(done))],
        "series": [
            {
                "region": each.endpoint.region,
                "model": each.endpoint.model,
                "bucket_s": each.endpoint.series.bucket_s,
                "first_s": each.endpoint.series.start_s,
                "end_s": each.endpoint.series.end_s,
                "reason": each.reason,
                "seconds": each.seconds,
                "chosen": dict(each.chosen),
                "scores": [asdict(score) for score in scores_of(each.predictions, quantile, each.costs)],
            }
            for each in done
        ],
    }


def _mean_costs(done: "Sequence[SeriesBacktest]") -> "dict[str, Cost]":
    from forecasts.backtests import Cost

    by_forecaster: dict[str, list[Cost]] = {}
    for each in done:
        for name, cost in each.costs.items():
            by_forecaster.setdefault(name, []).append(cost)
    return {
        name: Cost(
            None if costs[0].fit_s is None else mean(cost.fit_s or 0.0 for cost in costs),
            mean(cost.forecast_s for cost in costs),
        )
        for name, costs in by_forecaster.items()
    }


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    columns: Columns = {
        **same("forecaster", "hours"),
        "error": lambda row: _percent(row["error"]),
        "coverage": lambda row: _percent(row["coverage"]),
        "pinball": lambda row: _percent(row["pinball"]),
        "over-provision": lambda row: _percent(row["over_provision"]),
        "at equal cover": lambda row: _percent(row["equal_cover"]),
        "fit, s": lambda row: _seconds(row["fit_s"]),
        "forecast, s": lambda row: _seconds(row["forecast_s"]),
    }
    for each in answer["series"]:
        span = f"{time_text(each['first_s'])} to {time_text(each['end_s'])}, every {each['bucket_s']:g} s"
        print_table(escape(f"{each['model']} in {each['region']}, {span}"), columns, each["scores"])
        if each["chosen"]:
            times = sorted(each["chosen"].items(), key=lambda item: -item[1])
            typer.echo("champion: " + ", ".join(f"{count} x {name}" for name, count in times))
        typer.echo((f"{each['reason']}; " if each["reason"] else "") + f"{each['seconds']:.1f} s\n")
    if len(answer["series"]) > 1:
        title = f"All {len(answer['series'])} series, for the {100 * answer['quantile']:g} % quantile"
        print_table(title, columns, answer["overall"])
    if answer["interrupted"]:
        notes().print("interrupted: this is what was done so far")


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def _panel(each: "SeriesBacktest", quantile: float) -> "ForecastPanel":
    """The champion's picture of a series, its demand in the windows that are forecast."""
    import numpy as np

    from forecasts.backtests import CHAMPION, HOUR_S, scores_of, window_s
    from ops.plots.forecast_plot import ForecastPanel
    from ops.plots.panels import Curve

    rows = [one for one in each.predictions if one.forecaster == CHAMPION]
    (score,) = scores_of(rows, quantile, {})
    series = each.endpoint.series.before(rows[-1].origin_s + HOUR_S)
    known = series.rebin(window_s(series.bucket_s))
    starts = known.start_s + known.bucket_s * np.arange(len(known.values), dtype=np.float64)
    return ForecastPanel(
        title=each.endpoint.name,
        demand=Curve(start_s=starts, tokens_per_s=known.values, bucket_s=known.bucket_s),
        origin_s=np.array([one.origin_s for one in rows]),
        horizon_s=HOUR_S,
        peak_q50=np.array([one.peak_q50 for one in rows]),
        peak_upper=np.array([one.peak_upper for one in rows]),
        actual_peak=np.array([one.actual for one in rows], dtype=np.float64),
        error=score.error,
        coverage=score.coverage,
        pinball=score.pinball,
    )


def _reliability(done: "Sequence[SeriesBacktest]", quantile: float) -> "ReliabilityPanel | None":
    """The champion's reliability over all series."""
    from forecasts.backtests import CHAMPION, reliability_of, scores_of
    from ops.plots.forecast_plot import ReliabilityPanel

    rows = [one for each in done for one in each.predictions if one.forecaster == CHAMPION]
    found, (score,) = reliability_of(rows), scores_of(rows, quantile, {})
    if found is None or score.coverage is None:
        return None
    return ReliabilityPanel(
        hours=found.hours, levels=found.levels, covered=found.covered, upper=(quantile, score.coverage)
    )


def _draw(path: Path, done: "Sequence[SeriesBacktest]", file: Path, quantile: float) -> None:
    from ops.plots.forecast_plot import draw_forecasts
    from ops.plots.panels import PlotError

    panels = [_panel(each, quantile) for each in done if each.predictions]
    try:
        left_out = draw_forecasts(
            panels,
            path,
            title=f"Backtest of {file.name}: the hourly peak",
            quantile=quantile,
            reliability=_reliability(done, quantile),
        )
    except PlotError as error:
        raise CommandError(str(error)) from error
    if left_out:
        notes().print(f"{path}: {left_out} series of the least demand are not drawn", markup=False)
