"""Forecasts on hard series, generated and real: `python -m ops.bench.planner.forecast_zoo --help`.

Every hour of a series' second half is forecast from what was known then. Per series and per kind: the coverage of the
upper quantile, the error against that of the best single method (known in hindsight only) and of the last hour's
maximum, the pinball loss, and CPU seconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from forecasts.backtests import CHAMPION, ROUNDING, Prediction, run_backtests, scores_of
from forecasts.importers.rates import read_servegen
from forecasts.importers.series_file import EndpointSeries
from forecasts.importers.settings import ImportSettings
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.selection.combination import COMBINATION
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from forecasts.zoo import HELD_OUT_KINDS, KINDS, hard_series
from ops.client.screen import AsJson, notes, print_json, print_table

COVERAGE = (0.85, 0.95)
TO_BEST = 1.05
TO_LAST_HOUR = 1.05
HOURS_MIN = 72
"""Fewer judged hours with a known peak are too few for a coverage."""
CLIENTS_MAX = 200
TOKENS_PER_REQUEST = 1000.0
SERVEGEN_BUCKET_S = 600.0


@dataclass(frozen=True, kw_only=True)
class HardResult:
    """One series. Errors are weighted errors of the hourly peak, shares of 1; None without any demand.

    Attributes:
        below: share of hours whose peak was below the upper quantile; with `coverage`, at or below it. A quantile of
            0.9 has at most 0.9 below it and at least 0.9 at or below it, so that silence, which is both, is covered.
        alone: error of each single method.
        picked: error of the rival: in each hour the single method with the least error until then.
        pinball: loss of the upper quantile over the mean peak.
        forecast_cpu_s: median over the hours, with refits, the choice and the calibration.
    """

    kind: str
    name: str
    hours: int
    error: float | None
    alone: Mapping[str, float]
    picked: float | None
    below: float
    coverage: float
    pinball: float | None
    forecast_cpu_s: float
    cpu_s: float

    @property
    def best(self) -> str:
        return min(self.alone, key=lambda name: (self.alone[name], name))

    @property
    def to_best(self) -> float:
        return self._to_best(self.error)

    @property
    def to_last_hour(self) -> float:
        return self._to_last_hour(self.error)

    def meets_errors(self, error: float | None) -> bool:
        """Whether an error, the combination's or the rival's, meets both targets of errors."""
        return self._to_best(error) <= TO_BEST and self._to_last_hour(error) <= TO_LAST_HOUR

    def _to_best(self, error: float | None) -> float:
        return _ratio(error, self.alone.get(self.best) if self.alone else None)

    def _to_last_hour(self, error: float | None) -> float:
        return _ratio(error, self.alone.get(LAST_HOUR_MAX))

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that it misses."""
        found = []
        if self.coverage < COVERAGE[0]:
            found.append("low coverage")
        if self.below > COVERAGE[1]:
            found.append("high coverage")
        if self.to_best > TO_BEST:
            found.append("best single")
        if self.to_last_hour > TO_LAST_HOUR:
            found.append("last hour")
        return tuple(found)


def _ratio(error: float | None, other: float | None) -> float:
    if error is None or other is None or error == other:
        return 1.0
    return error / other if other else float("inf")


def least_past_error(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Of each hour the single method with the least error until then: the first behind the champion, by their order."""
    picked: dict[float, Prediction] = {}
    for one in predictions:
        if one.forecaster not in {CHAMPION, COMBINATION}:
            picked.setdefault(one.origin_s, one)
    return [one._replace(forecaster="picked") for one in picked.values()]


def generated(kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, EndpointSeries]]:
    """The zoo's series by kind; the region of each is its seed."""
    for kind in kinds:
        for seed in seeds:
            yield kind, EndpointSeries(region=str(seed), model=kind, series=hard_series(kind, seed))


def clients(data: Path, model: str) -> Iterator[tuple[str, EndpointSeries]]:
    """Every client of a ServeGen model as a series of its own; those without any demand are left out.

    Args:
        data: the folder with servegen/.
        model: m-small or m-mid.
    """
    names = tuple(str(number) for number in range(CLIENTS_MAX))
    settings = ImportSettings(model=model, regions=names, tokens_per_request=TOKENS_PER_REQUEST)
    rows: dict[str, list[tuple[float, float | None]]] = {}
    for row in read_servegen(data / "servegen" / f"{model}_clients.csv.gz", settings):
        rows.setdefault(row.region, []).append((row.start_s, row.tokens_per_s))
    for name, values in rows.items():
        if any(value for _, value in values):
            series = DemandSeries.from_rows(values, bucket_s=SERVEGEN_BUCKET_S)
            yield f"client of {model}", EndpointSeries(region=name, model=model, series=series)


def measure(work: tuple[str, EndpointSeries], settings: ForecastSettings, hours: int | None) -> HardResult | None:
    """Forecast the newest hours of a series, or its second half; None if fewer than `HOURS_MIN` have an outcome."""
    kind, endpoint = work
    marks = [time.process_time()]
    (done,), _ = run_backtests(
        [endpoint], settings, hours_max=hours, progress=lambda *_: marks.append(time.process_time())
    )
    champion = [one for one in done.predictions if one.forecaster == CHAMPION]
    known = [(one.actual, one.peak_upper) for one in champion if one.actual is not None]
    if len(known) < HOURS_MIN:
        return None
    scores = {score.forecaster: score for score in scores_of(done.predictions, settings.quantile, {})}
    (picked,) = scores_of(least_past_error(done.predictions), settings.quantile, {})
    return HardResult(
        kind=kind,
        name=endpoint.name,
        hours=len(known),
        error=scores[CHAMPION].error,
        alone={n: s.error for n, s in scores.items() if n not in {CHAMPION, COMBINATION} and s.error is not None},
        picked=picked.error,
        below=float(np.mean([actual < upper for actual, upper in known])),
        coverage=float(np.mean([actual <= upper * (1 + ROUNDING) for actual, upper in known])),
        pinball=scores[CHAMPION].pinball,
        forecast_cpu_s=statistics.median(np.diff(marks[1:]).tolist()),
        cpu_s=marks[-1] - marks[0],
    )


def main(
    *,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be given again.")] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="The kinds that no setting was chosen on.")] = False,
    seeds: Annotated[int, typer.Option(min=0, help="How many series of each kind.")] = 3,
    first_seed: Annotated[int, typer.Option(help="Seeds from 1000 on were not looked at.")] = 1000,
    data: Annotated[Path | None, typer.Option(help="Add the clients of ServeGen: the folder with servegen/.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Only every so many of the clients.")] = 1,
    hours: Annotated[int | None, typer.Option(min=HOURS_MIN, help="Newest hours. Default: the second half.")] = None,
    processes: Annotated[int, typer.Option(min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """Coverage, error and CPU seconds on hard series, by kind and series.

    Example: python -m ops.bench.planner.forecast_zoo --seeds 4 --data ../shared/data --json > zoo.json
    """
    kinds = tuple(kind or (HELD_OUT_KINDS if held_out else KINDS))
    work = list(generated(kinds, range(first_seed, first_seed + seeds)))
    if data is not None:
        work += [each for model in ("m-small", "m-mid") for each in clients(data, model)][::every]
    found = []
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(partial(measure, settings=ForecastSettings(), hours=hours), work):
            if row is not None:
                found.append(row)
                notes().print(f"{row.kind}, {row.name}: {row.cpu_s:.1f} CPU s; missed: {', '.join(row.missed) or '-'}")
    if as_json:
        print_json({"series": [_record(row) for row in found], "kinds": [_of_kind(k, found) for k in _kinds(found)]})
        return
    _print(found)


def _kinds(found: Sequence[HardResult]) -> list[str]:
    return list(dict.fromkeys(row.kind for row in found))


def _record(row: HardResult) -> dict[str, object]:
    derived = {"best": row.best if row.alone else None, "to_best": row.to_best, "to_last_hour": row.to_last_hour}
    return {**asdict(row), **derived, "missed": list(row.missed)}


def _of_kind(kind: str, found: Sequence[HardResult]) -> dict[str, object]:
    rows = [row for row in found if row.kind == kind]
    losses = [row.pinball for row in rows if row.pinball is not None]
    misses: Callable[[str], int] = lambda what: sum(what in row.missed for row in rows)  # noqa: E731
    return {
        "kind": kind,
        "series": len(rows),
        "met": sum(not row.missed for row in rows),
        "low": misses("low coverage"),
        "high": misses("high coverage"),
        "best": misses("best single"),
        "last_hour": misses("last hour"),
        "errors_met": sum(row.meets_errors(row.error) for row in rows),
        "rival_errors_met": sum(row.meets_errors(row.picked) for row in rows),
        "coverage": statistics.mean(row.coverage for row in rows),
        "to_best": statistics.median(row.to_best for row in rows),
        "to_last_hour": statistics.median(row.to_last_hour for row in rows),
        "pinball": statistics.median(losses) if losses else None,
        "cpu": statistics.median(row.forecast_cpu_s for row in rows),
    }


def _print(found: Sequence[HardResult]) -> None:
    columns = {
        **{name: name for name in ("kind", "series", "met")},
        "coverage low": "low",
        "high": "high",
        "over best": "best",
        "over last hour": "last_hour",
        "errors met": "errors_met",
        "by the least past error": "rival_errors_met",
        "coverage": lambda row: f"{row['coverage']:.3f}",
        "to best": lambda row: f"{row['to_best']:.2f}x",
        "to last hour": lambda row: f"{row['to_last_hour']:.2f}x",
        "pinball": lambda row: "-" if row["pinball"] is None else f"{row['pinball']:.3f}",
        "CPU s": lambda row: f"{row['cpu']:.3f}",
    }
    series = {
        **{name: name for name in ("kind", "name", "hours", "best")},
        "error": lambda row: "-" if row["error"] is None else f"{row['error']:.1%}",
        "to best": lambda row: f"{row['to_best']:.2f}x",
        "to last hour": lambda row: f"{row['to_last_hour']:.2f}x",
        "coverage": lambda row: f"{row['below']:.3f} to {row['coverage']:.3f}",
        "missed": lambda row: ", ".join(row["missed"]) or "-",
    }
    print_table("Series", series, [_record(row) for row in found])
    print_table(
        "Kinds: series, how many meet all targets, and miss each", columns, [_of_kind(k, found) for k in _kinds(found)]
    )


if __name__ == "__main__":
    typer.run(main)
