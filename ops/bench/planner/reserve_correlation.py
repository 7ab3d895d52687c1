"""What an estimated correlation of forecast errors changes for shared reserves: their size, and how often they do not
suffice, hour by hour on forecasts that are made as the simulator makes them. Nothing is served.

python -m ops.bench.planner.reserve_correlation --data DATA
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.error_correlation import (
    NO_ERRORS,
    PeakErrors,
    estimate_correlation,
)
from controlplane.policies.placement.pools import PoolLoad
from controlplane.policies.placement.reserve import choose_reserve
from controlplane.policies.placement.reserve_facts import ReserveEndpoint, ReserveFacts, ReservePlace, ReserveSettings
from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from forecasts.selection.combination import COMBINATION
from forecasts.selection.past import PastPeaks, SeriesState
from forecasts.selection.select import forecast_peak
from forecasts.settings import ForecastSettings
from ops.bench.planner.strategies_cases import CASES, SCENARIO, case_scenario, thetas_of
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import Scenario, ScenarioError
from ops.simulator.traffic.demand import Demand
from ops.simulator.world.planning import errors_of

LEARNT_HOURS = 48
"""Errors of so many hours are known before the first reserve is sized."""
QUANTILES = (0.9, 0.51)
_GPUS = 10_000
"""A region has enough of them: only sizes are compared."""
_LOAD = PoolLoad(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-9,
    decode_base_s=0.0,
    decode_per_context_token_s=0.0,
    requests_per_s=0.0,
    input_tokens=1000.0,
    output_tokens=1.0,
    switch_s=0.0,
)
"""A reserve takes of a model's demand what instances of its own would."""


@dataclass(frozen=True, kw_only=True)
class Hour:
    """A forecast and what came, in tokens/s."""

    median: float
    upper: float
    actual: float


Hours = Mapping[Endpoint, Mapping[int, Hour]]
"""By endpoint and the hour of the forecast (Unix time / 3600)."""


def forecast_hours(scenario: Scenario, seed: int) -> tuple[Hours, PeakErrors]:
    """The forecasts of every full hour of a scenario's traffic but the last, as far as forecasts remember, and their
    errors as the simulator's plans know them, which also has those of hours that had a baseline's forecast only.
    """
    demand = Demand.of(traffic_of(scenario, seed))
    whole_s = (scenario.traffic.duration_s or 0.0) // 3600 * 3600
    origins = int(whole_s / 3600) - 5
    settings = ForecastSettings(
        quantile=scenario.planning.quantile,
        forecasters=scenario.planning.forecasters,
        origins_max=min(origins, ForecastSettings().memory),
    )
    hours, errors = {}, {}
    for endpoint in demand.endpoints:
        forecast = forecast_peak(demand.series(endpoint, since_s=0.0, until_s=whole_s), settings)
        hours[endpoint] = hours_of(SeriesState.from_json(forecast.state).past)
        errors[endpoint] = errors_of(forecast, settings)
    return hours, errors


def hours_of(past: PastPeaks) -> dict[int, Hour]:
    """The hours in which the combination gave a forecast, and the peak is known."""
    columns = (past.origins_s, past.median[COMBINATION], past.upper[COMBINATION], past.actual)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {int(at_s // 3600): Hour(median=m, upper=u, actual=y) for at_s, m, u, y in rows if not isnan(m + y)}


def known_at(errors: PeakErrors, hour: int) -> PeakErrors:
    """The errors that are known when an hour begins."""
    return {endpoint: {at: error for at, error in each.items() if at < hour} for endpoint, each in errors.items()}


def correlations(errors: PeakErrors, setting: float) -> dict[str, str]:
    """What all hours say, by region and by model."""
    groups = {endpoint.region: [one for one in errors if one.region == endpoint.region] for endpoint in errors}
    groups |= {endpoint.model: [one for one in errors if one.model == endpoint.model] for endpoint in errors}
    return {name: str(estimate_correlation([group], errors, setting)) for name, group in groups.items()}


def sized(hours: Hours, errors: PeakErrors, theta: Mapping[str, float], settings: ReserveSettings) -> dict[str, Any]:
    """GPUs that are planned, own and reserve, and the shares of hours in which the reserves of regions did not take
    epsilon of the demand beyond own instances, and in which all of them did not take all of it. `errors`: those that
    the correlation is estimated from; without any it is the one that is set.
    """
    first = min(min(each) for each in hours.values()) + LEARNT_HOURS
    gpus, short_home, short = [], [], []
    for at in sorted({at for each in hours.values() for at in each if at >= first}):
        came = {endpoint: each[at] for endpoint, each in hours.items() if at in each}
        facts = ReserveFacts(
            endpoints=tuple(_asked(came, theta)),
            places={
                RegionGpu(region=one.region, gpu_type=""): ReservePlace(slot_gpus=1, free_gpus=_GPUS) for one in came
            },
            errors=known_at(errors, at),
        )
        reserve = choose_reserve(facts, 0.0, settings)
        own = {one.key.endpoint: one.instances for one in reserve.endpoints}
        slots = {size.place.region: size.gpus for size in reserve.sizes}
        gpus.append(sum(own.values()) + sum(slots.values()))
        beyond: dict[str, float] = dict.fromkeys((one.region for one in came), 0.0)
        models: dict[str, float] = dict.fromkeys((one.model for one in came), 0.0)
        for one, hour in came.items():
            asked = hour.actual / theta[one.model]
            beyond[one.region] += max(0.0, settings.epsilon * asked - own[one])
            models[one.model] += asked - own[one]
        short_home += [needed > settings.fill * slots.get(region, 0) + 1e-9 for region, needed in beyond.items()]
        needed_in_all = sum(max(0.0, lacking) for lacking in models.values())
        short.append(needed_in_all > settings.fill * sum(slots.values()) + 1e-9)
    return {"hours": len(gpus), "gpus": fmean(gpus), "short_home": fmean(short_home), "short": fmean(short)}


def _asked(came: Mapping[Endpoint, Hour], theta: Mapping[str, float]) -> Iterator[ReserveEndpoint]:
    for one, hour in came.items():
        yield ReserveEndpoint(
            key=EndpointGpu(model=one.model, region=one.region, gpu_type=""),
            median=min(hour.median, hour.upper),
            upper=hour.upper,
            tokens_per_s=theta[one.model],
            gpus=1,
            load=_LOAD,
        )


COLUMNS: Columns = {
    "quantile": "quantile",
    "correlation": "correlation",
    "hours": "hours",
    "GPUs": lambda row: f"{row['gpus']:.1f}",
    "short at home": lambda row: f"{row['short_home']:.1%}",
    "short in all": lambda row: f"{row['short']:.1%}",
}


def compared(
    hours: Hours, errors: PeakErrors, theta: Mapping[str, float], scenario: Scenario
) -> Sequence[dict[str, Any]]:
    """A row for each quantile, with the correlation that is set and with the estimated one."""
    planning, rows = scenario.planning, []
    for quantile in QUANTILES:
        settings = ReserveSettings(
            enabled=True,
            quantile=quantile,
            upper_quantile=planning.quantile,
            correlation=planning.reserve_correlation,
            fill=1.0,
            epsilon=planning.epsilon,
        )
        for name, known in (("set", NO_ERRORS), ("estimated", errors)):
            rows.append({"quantile": quantile, "correlation": name, **sized(hours, known, theta, settings)})
    return rows


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "four-day",
    seed: Annotated[int, typer.Option(min=0)] = 1,
    as_json: AsJson = False,
) -> None:
    """Compare reserves that are sized by the correlation that is set and by what past errors say.

    \b
    Example:
      python -m ops.bench.planner.reserve_correlation --data DATA --case four-day
    """
    [name] = chosen([case], CASES, "--case")
    try:
        with work_folder() as folder:
            scenario = case_scenario(CASES[name], "lt-d-reserve", data, folder, SCENARIO, ())
            hours, errors = forecast_hours(scenario, seed)
        theta = thetas_of(scenario)
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(str(error)) from error
    found = correlations(errors, scenario.planning.reserve_correlation)
    rows = compared(hours, errors, theta, scenario)
    if as_json:
        print_json({"correlations": found, "reserves": rows})
        return
    shown = [{"of": name, "errors": words} for name, words in found.items()]
    print_table("How far errors of forecasts go together", {"of": "of", "errors": "errors"}, shown)
    print_table(f"Reserves of {name}", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
