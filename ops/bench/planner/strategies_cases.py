"""What the strategies are compared on, and what a run amounts to: days and weeks of the recordings, a burst, the
strategies' own variants; instance hours and what they were for, wasted starts, TTFT.

Each recording is thinned to seven instances of demand on average over the day that is served, as the scenario says;
that day is its fullest without gaps. The days before it are learnt from. A week has a day before it, ServeGen's a week.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forecasts.importers.lines import DemandFileError, open_csv
from ops.simulator.results.results import EndpointSeries, Result, Row, Series, State
from ops.simulator.scenario.scenario import Scenario, ScenarioError, load_scenario

HIGH = 0.7
"""Above this effective memory utilization an endpoint is short of room."""
SLOW_S = 2.0
"""A minute is slow if IW-F's 95th percentile of TTFT is above: twice the objective."""
_OURS: tuple[State, ...] = ("serving", "warming", "draining", "pooled")
"""States whose hours are ours."""
_WINDOW = 5
_HOUR = 60


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Instance hours by what they were for; they add up to all of them. Theta: as the planner takes it (LOADS).

    Attributes:
        demand: what interactive requests ask for at theta.
        peak: from there to the fullest five minutes of each hour, which a plan of an hour must hold.
        headroom: from there to what the plan counts on: the upper quantile, the forecast's error, beta of NIW.
        minimum: what the minimum of instances adds to that (without a plan: to the demand).
        rounding: whole instances, less what epsilon lets other regions serve.
        beside: beyond the plan, or without one: starts, drains, thresholds, delays of a strategy.
    """

    demand: float
    peak: float
    headroom: float
    minimum: float
    rounding: float
    beside: float


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """One strategy's run.

    Attributes:
        instance_hours: serving, warming, draining, and the GPUs of pools and reserves; spot ones are somebody else's.
        warming_hours: of those, what starts took.
        redeploys: starts in the place of another model's spot instance.
        ttft_p95_s, ttft_p99_s, late: of IW-F requests; `late` is the share whose first token was.
        iw_failed, niw_failed: shares of the requests that ended without an answer.
        high_minutes: minutes in which an endpoint was above `HIGH`, over all endpoints.
        high_longest: the longest that one was, in minutes.
        slow_minutes, slow_longest: minutes that were slow, and the longest time without one that was not.
        cpu_s: what the simulation took.
        tail_hours: of `instance_hours`, after the last request came, until deferred work that was left is done. None:
            not known, of a run that was stored before this was measured.
        work_hours: what all requests, deferred ones too, ask for at theta. Fewer hours need more of KV memory than the
            profile says is well. None: not known, as above.
    """

    requests: int
    instance_hours: float
    warming_hours: float
    spot_hours: float
    scale_outs: int
    redeploys: int
    ttft_p95_s: float
    ttft_p99_s: float
    late: float
    iw_failed: float
    niw_failed: float
    high_minutes: int
    high_longest: int
    slow_minutes: int
    slow_longest: int
    parts: Parts
    cpu_s: float
    event_log_hash: str
    tail_hours: float | None = None
    work_hours: float | None = None


def figures_of(
    result: Result,
    tokens_per_s: Mapping[str, float],
    instances_min: int,
    cpu_s: float,
    served_s: float | None = None,
    load: float = 1.0,
) -> StrategyFigures:
    """What a table says of a run. `tokens_per_s`: `load` times theta by model, as the planner takes it. `served_s`: for
    how long requests came.
    """
    hours = result.totals.gpu_hours
    tiers = {row.tier: row for row in result.tiers}
    urgent = tiers.get("IW-F")
    high = [[(value or 0.0) > HIGH for value in one.utilization] for one in result.series.endpoints]
    slow = [(p95_s or 0.0) > SLOW_S for one in result.series.tiers if one.tier == "IW-F" for p95_s in one.ttft_p95_s]
    interactive = [row for row in result.tiers if row.tier != "NIW"]
    instance_hours = sum(hours.get(state, 0.0) for state in _OURS)
    return StrategyFigures(
        requests=result.requests,
        instance_hours=instance_hours,
        warming_hours=hours.get("warming", 0.0),
        spot_hours=hours.get("spot", 0.0),
        scale_outs=result.totals.scale_outs,
        redeploys=result.totals.starts.get("spot_other", 0),
        ttft_p95_s=urgent.ttft_s.p95 if urgent and urgent.ttft_s else float("nan"),
        ttft_p99_s=urgent.ttft_s.p99 if urgent and urgent.ttft_s else float("nan"),
        late=urgent.ttft_violations if urgent else 0.0,
        iw_failed=sum(row.failed for row in interactive) / max(1, sum(row.requests for row in interactive)),
        niw_failed=tiers["NIW"].failed / tiers["NIW"].requests if "NIW" in tiers else 0.0,
        high_minutes=sum(map(sum, high)),
        high_longest=max(map(_longest, high), default=0),
        slow_minutes=sum(slow),
        slow_longest=_longest(slow),
        parts=parts_of(result.series.endpoints, tokens_per_s, instances_min, instance_hours),
        cpu_s=cpu_s,
        event_log_hash=result.event_log_hash,
        tail_hours=None if served_s is None else tail_hours(result.series, served_s),
        work_hours=load * work_hours(result.rows, tokens_per_s),
    )


def work_hours(rows: Sequence[Row], tokens_per_s: Mapping[str, float]) -> float:
    """Instance hours that the requests ask for, each model's input tokens at its theta (`tokens_per_s`)."""
    return sum(row.input_tokens / tokens_per_s[row.model] for row in rows if row.model is not None) / 3600


def tail_hours(series: Series, served_s: float) -> float:
    """Instance hours in the whole minutes after a time from the beginning on."""
    first = ceil(served_s / series.step_s)
    ours = [column[first:] for state, column in series.gpus.items() if state in _OURS]
    return sum(map(sum, ours)) / _HOUR


def parts_of(
    endpoints: list[EndpointSeries], tokens_per_s: Mapping[str, float], instances_min: int, instance_hours: float
) -> Parts:
    """What the hours were for, from series of a value a minute that begin with an hour."""
    needed = np.array([one.demand for one in endpoints], float)
    needed /= np.array([[tokens_per_s[one.model]] for one in endpoints])
    planned = np.array([one.planned for one in endpoints], float)
    expected = np.array([one.forecast for one in endpoints], float)
    expected /= np.array([[tokens_per_s[one.model]] for one in endpoints])
    unplanned = np.isnan(planned)
    peaks = np.where(unplanned.all(axis=0), needed.sum(axis=0), _peaks(needed.sum(axis=0)))
    expected = np.where(unplanned, needed, expected)
    floor = np.maximum(instances_min - expected, 0.0)
    whole = np.where(unplanned, expected + floor, planned)
    steps = (needed.sum(axis=0), peaks, expected.sum(axis=0), (expected + floor).sum(axis=0), whole.sum(axis=0))
    demand, peak, headroom, minimum, rounding = np.diff([0.0, *(step.sum() / _HOUR for step in steps)]).tolist()
    return Parts(
        demand=demand,
        peak=peak,
        headroom=headroom,
        minimum=minimum,
        rounding=rounding,
        beside=instance_hours - float(whole.sum()) / _HOUR,
    )


def _peaks(needed: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For every minute the mean of the highest five minutes of its hour."""
    peaks = np.empty_like(needed)
    for first in range(0, len(needed), _HOUR):
        hour = needed[first : first + _HOUR]
        windows = [hour[place : place + _WINDOW].mean() for place in range(0, len(hour), _WINDOW)]
        peaks[first : first + _HOUR] = max(windows)
    return peaks


def _longest(flags: list[bool]) -> int:
    return max((len(list(run)) for flag, run in groupby(flags) if flag), default=0)


SCENARIO = Path(__file__).parents[2] / "scenarios" / "strategies.toml"
_INTERACTIVE = "traffic.tiers={IW-F=45, IW-N=27}"
"""Where the recording tells deferred requests apart."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A traffic. `recording`: format and path below the data's folder; None: the scenario's own is made up. `model`: of
    the recording, this one only. Times of the recording in days: from when, learnt until, served until. `parts`: of
    several recordings at once, by the name of the model that each is of; they are learnt for equally long.
    """

    recording: tuple[str, str] | None = None
    model: str | None = None
    days: tuple[int, int, int] | None = None
    settings: tuple[str, ...] = ()
    parts: Mapping[str, "Case"] = field(default_factory=dict)

    def all_settings(self) -> tuple[str, ...]:
        """Settings in the form of `--set`."""
        if self.days is None:
            return self.settings
        since, served, until = (86_400 * day for day in self.days)
        window = (f"traffic.from_s={since}", f"traffic.until_s={until}", f"planning.learn_s={served - since}")
        return (*self.settings, *window)


_SAGESERVE = ("sageserve", "sageserve/nov2024_week_prompt_tokens_per_min.csv.gz")
_AZURE = ("azure-2024", "azure/azure2024_week_requests_10s_Coding.csv.gz")
_SERVEGEN = ("servegen", "servegen/m-mid_clients.csv.gz")
_A = ("traffic.scale=0.3416", _INTERACTIVE)
_C = ("traffic.scale=0.4696", _INTERACTIVE)
_CODING = (  # many tokens in, few out: prefill bounds it, and theta is another
    "traffic.scale=0.282",
    "traffic.prompt_tokens={mean=2560, spread=1.0, most=32768}",
    "traffic.output_tokens={mean=38, spread=1.0, most=4096}",
    "models.0.tokens_per_s=3800",
)
_CLIENTS = ("traffic.scale=0.00183",)
_BURST = (
    "planning.learn_s=86400",
    "traffic.duration_s=97200",
    "traffic.day_swing=0",
    "traffic.bursts=[{start_s=92400, duration_s=300, factor=8}]",
)

_A_DAY = Case(recording=_SAGESERVE, model="A", days=(0, 3, 4), settings=_A)
_A_WEEK = Case(recording=_SAGESERVE, model="A", days=(0, 1, 7), settings=_A)
_C_DAY = Case(recording=_SAGESERVE, model="C", days=(0, 3, 4), settings=_C)
_C_WEEK = Case(recording=_SAGESERVE, model="C", days=(0, 1, 7), settings=_C)
_AZURE_WEEK = Case(recording=_AZURE, days=(0, 1, 7), settings=_CODING)

FOUR_VMS: Mapping[str, int] = {"us-east": 32, "us-central": 12, "us-west": 16}
"""VMs of the four models together, at first in equal shares. SageServe begins with 20 for each model and region and so
binds nobody; these are captive, and 60 as for one model alone, dealt by what regions ask for. The five fullest minutes
ask for 46 instances of all models, but the models' own for 54, and us-east's for 25 and 31: with headroom and whole
instances there is room for the former, and for the latter only if models give VMs to each other.
"""
_NODES = (f'{{region="{at}", count={n}, slots=1, host_bytes=1400000000000}}' for at, n in FOUR_VMS.items())
_FOUR = (f"fleet.nodes=[{', '.join(_NODES)}]",)

CASES: Mapping[str, Case] = {
    "a-day": _A_DAY,
    "c-day": _C_DAY,
    "azure-day": Case(recording=_AZURE, days=(0, 4, 5), settings=_CODING),
    "servegen-day": Case(recording=_SERVEGEN, days=(8, 12, 13), settings=_CLIENTS),
    "burst": Case(settings=_BURST),
    "a-week": _A_WEEK,
    "c-week": _C_WEEK,
    "azure-week": _AZURE_WEEK,
    "servegen-week": Case(recording=_SERVEGEN, days=(0, 7, 14), settings=_CLIENTS),
    "four-day": Case(
        parts={
            "A": _A_DAY,
            "C": _C_DAY,
            "coding": Case(recording=_AZURE, days=(1, 4, 5), settings=_CODING),
            "mid": Case(recording=_SERVEGEN, days=(9, 12, 13), settings=_CLIENTS),
        },
        settings=_FOUR,
    ),
    "four-week": Case(
        parts={
            "A": _A_WEEK,
            "C": _C_WEEK,
            "coding": _AZURE_WEEK,
            "mid": Case(recording=_SERVEGEN, days=(7, 8, 14), settings=_CLIENTS),
        },
        settings=_FOUR,
    ),
}
"""By name. The burst: three hours of even traffic, and eight times as much for five minutes, forty minutes into the
second of them, where LT-UA may leave the plan.
"""

_RESERVE = ("planning.reserve=true", "planning.pool_prompt_tokens=2200", "planning.pool_output_tokens=500")

VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "siloed": ("siloed", ()),
    "reactive": ("reactive", ()),
    "reactive-50-25": ("reactive", ("scaling.out_above=0.5", "scaling.in_below=0.25")),
    "reactive-clairvoyant": ("reactive", ("policy.clairvoyant=true",)),
    "lt-i": ("lt-i", ()),
    "lt-u": ("lt-u", ()),
    "lt-ua": ("lt-ua", ()),
    "lt-i-median": ("lt-i", ("planning.quantile=0.51",)),
    "lt-ua-median": ("lt-ua", ("planning.quantile=0.51",)),
    "lt-i-reserve": ("lt-i", _RESERVE),
    "lt-d": ("lt-d", ()),
    "lt-d-reserve": ("lt-d", _RESERVE),
    "chiron": ("chiron", ()),
    "oracle": ("oracle", ()),
}
"""Strategies and their settings. SageServe prints 70 and 30 % for Reactive; the simulator it published scales at 50 and
25 %. It plans for the forecast's maximum, about the median of what comes, and not for an upper quantile.
"""

_IDLE_NODES = (f'{{region="{at}", count=80, slots=1, host_bytes=1400000000000}}' for at in FOUR_VMS)
_IDLE = ("scaling.instances_min=20", "scaling.instances_max=20", f"fleet.nodes=[{', '.join(_IDLE_NODES)}]")

POINTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **VARIANTS,
    "idle": ("reactive", _IDLE),
    "reactive-60-30": ("reactive", ("scaling.out_above=0.6", "scaling.in_below=0.3")),
    "reactive-40-20": ("reactive", ("scaling.out_above=0.4", "scaling.in_below=0.2")),
    "lt-i-75": ("lt-i", ("planning.quantile=0.75",)),
    "lt-d-median": ("lt-d", ("planning.quantile=0.51",)),
    "lt-i-reserve-median": ("lt-i", (*_RESERVE, "planning.reserve_quantile=0.51")),
    "lt-d-reserve-median": ("lt-d", (*_RESERVE, "planning.reserve_quantile=0.51")),
    "lt-d-tight": ("lt-d", ("scaling.room_out=1.0", "scaling.room_in=1.2")),
    "lt-d-wide": ("lt-d", ("scaling.room_out=1.3", "scaling.room_in=1.7")),
    "lt-d-reserve-busy": (
        "lt-d",
        (*_RESERVE, "planning.reserve_quantile=0.51", "scaling.room_out=1.0", "scaling.room_in=1.2"),
    ),
}
"""The same, and more of their settings, which make lines of hours against quality. Idle: 20 instances of each model in
each region, several times as many as are asked for, so that nearly every request finds one that does nothing: what is
late there are long prompts, with any strategy.
"""

LOADS: Mapping[str, float] = {"lt-d-reserve-busy": 1.33}
"""Strategies whose planner takes an instance to serve so many times theta: fewer hours, and more that is late."""


def case_scenario(case: Case, variant: str, data: Path, folder: Path, scenario: Path, more: Sequence[str]) -> Scenario:
    """The scenario of a run. `folder`: for the one model's part of a recording. `more`: settings over all others.

    Raises:
        ScenarioError: the scenario cannot be used.
        DemandFileError: the recording cannot be read, or lacks the model.
    """
    if case.parts:
        return _mixed(case, variant, data, folder, scenario, more)
    trace = None
    if case.recording is not None:
        kind, name = case.recording
        path = data / name
        trace = f"{kind}:{path if case.model is None else only_model(path, case.model, folder)}"
    strategy, own = POINTS[variant]
    loaded = load_scenario(scenario, trace=trace, settings=(*case.all_settings(), *own, *more))
    return _at_load(loaded.with_strategy(strategy), LOADS.get(variant, 1.0))


def _at_load(scenario: Scenario, load: float) -> Scenario:
    """The scenario, whose planner takes an instance to serve `load` times theta."""
    if load == 1.0:
        return scenario
    whole = scenario.model_dump()
    thetas = thetas_of(scenario)
    models = [one | {"tokens_per_s": load * thetas[one["name"]]} for one in whole["models"]]
    return Scenario.model_validate(whole | {"models": models})


def thetas_of(scenario: Scenario) -> dict[str, float]:
    """Tokens per second of an instance, by model, as the scenario's planner takes it.

    Raises:
        ScenarioError: it is not given, or depends on the GPU type; hours are not attributed then.
    """
    thetas: dict[str, float] = {}
    for index, model in enumerate(scenario.models):
        if not isinstance(model.tokens_per_s, int | float):
            raise ScenarioError(f"{scenario.name}: models.{index}.tokens_per_s: must be one number here")
        thetas[model.name] = model.tokens_per_s
    return thetas


def _mixed(case: Case, variant: str, data: Path, folder: Path, scenario: Path, more: Sequence[str]) -> Scenario:
    """The parts' scenarios as one: the traffic and the model of each, on one fleet."""
    alone = {
        name: case_scenario(part, variant, data, folder, scenario, (*case.settings, *more))
        for name, part in case.parts.items()
    }
    whole, *_ = (one.model_dump() for one in alone.values())
    parts = [one.traffic.model_dump() | {"models": {name: 1.0}} for name, one in alone.items()]
    models = [one.models[0].model_dump() | {"name": name} for name, one in alone.items()]
    first = [
        {"model": name, "region": node["region"], "count": node["count"] // len(alone)}
        for name in alone
        for node in whole["fleet"]["nodes"]
    ]
    changes = {
        "name": "four models in three regions",
        "traffic": {"kind": "mixed", "parts": parts},
        "models": models,
        "fleet": whole["fleet"] | {"instances": first},
    }
    return Scenario.model_validate(whole | changes)


def only_model(path: Path, model: str, folder: Path) -> Path:
    """A file in `folder` that holds one model's rows of a recording, by its column `model`.

    Raises:
        DemandFileError: the file cannot be read, or has no such model.
    """
    out, found = folder / f"{model}.csv", 0
    with open_csv(path) as file, out.open("w", newline="", encoding="utf-8") as written:
        writer = csv.writer(written)
        writer.writerow(file.header)
        for line in file.lines(("model", *file.header)):
            if line.word("model") == model:
                writer.writerow([line.text(column) for column in file.header])
                found += 1
    if not found:
        raise DemandFileError(f"{path}: column model: no row says {model!r}")
    return out
