"""What the strategies are compared on: days and weeks of the recordings, a burst, and the strategies' own variants.

Each recording is thinned to seven instances of demand on average over the day that is served, as the scenario says;
that day is its fullest without gaps. The days before it are learnt from. A week has a day before it, ServeGen's a week.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forecasts.importers.lines import DemandFileError, open_csv
from ops.simulator.scenario.scenario import Scenario, load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "strategies.toml"
_INTERACTIVE = "traffic.tiers={IW-F=45, IW-N=27}"
"""Where the recording tells deferred requests apart."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A traffic. `recording`: format and path below the data's folder; None: the scenario's own is made up. `model`: of
    the recording, this one only. Times of the recording in days: from when, learnt until, served until.
    """

    recording: tuple[str, str] | None = None
    model: str | None = None
    days: tuple[int, int, int] | None = None
    settings: tuple[str, ...] = ()

    def all_settings(self) -> tuple[str, ...]:
        """As `--set` takes them."""
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

CASES: Mapping[str, Case] = {
    "a-day": Case(recording=_SAGESERVE, model="A", days=(0, 3, 4), settings=_A),
    "c-day": Case(recording=_SAGESERVE, model="C", days=(0, 3, 4), settings=_C),
    "azure-day": Case(recording=_AZURE, days=(0, 4, 5), settings=_CODING),
    "servegen-day": Case(recording=_SERVEGEN, days=(8, 12, 13), settings=_CLIENTS),
    "burst": Case(settings=_BURST),
    "a-week": Case(recording=_SAGESERVE, model="A", days=(0, 1, 7), settings=_A),
    "c-week": Case(recording=_SAGESERVE, model="C", days=(0, 1, 7), settings=_C),
    "azure-week": Case(recording=_AZURE, days=(0, 1, 7), settings=_CODING),
    "servegen-week": Case(recording=_SERVEGEN, days=(0, 7, 14), settings=_CLIENTS),
}
"""By name. The burst: three hours of even traffic, and eight times as much for five minutes, forty minutes into the
second of them, where LT-UA may leave the plan.
"""

VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "siloed": ("siloed", ()),
    "reactive": ("reactive", ()),
    "reactive-50-25": ("reactive", ("scaling.out_above=0.5", "scaling.in_below=0.25")),
    "lt-i": ("lt-i", ()),
    "lt-u": ("lt-u", ()),
    "lt-ua": ("lt-ua", ()),
    "lt-i-median": ("lt-i", ("planning.quantile=0.51",)),
    "lt-ua-median": ("lt-ua", ("planning.quantile=0.51",)),
    "lt-d": ("lt-d", ()),
    "chiron": ("chiron", ()),
    "oracle": ("oracle", ()),
}
"""Strategies and their settings. SageServe prints 70 and 30 % for Reactive; the simulator it published scales at 50 and
25 %. It plans for the forecast's maximum, about the median of what comes, and not for an upper quantile.
"""

POINTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **VARIANTS,
    "reactive-60-30": ("reactive", ("scaling.out_above=0.6", "scaling.in_below=0.3")),
    "reactive-40-20": ("reactive", ("scaling.out_above=0.4", "scaling.in_below=0.2")),
    "lt-i-75": ("lt-i", ("planning.quantile=0.75",)),
    "lt-d-median": ("lt-d", ("planning.quantile=0.51",)),
    "lt-d-tight": ("lt-d", ("scaling.room_out=1.0", "scaling.room_in=1.2")),
    "lt-d-wide": ("lt-d", ("scaling.room_out=1.3", "scaling.room_in=1.7")),
}
"""The same, and more of their settings, which make lines of hours against quality."""


def case_scenario(case: Case, variant: str, data: Path, folder: Path, scenario: Path, more: Sequence[str]) -> Scenario:
    """The scenario of a run. `folder`: for the one model's part of a recording. `more`: settings over all others.

    Raises:
        ops.simulator.scenario.scenario.ScenarioError: the scenario cannot be used.
        DemandFileError: the recording cannot be read, or lacks the model.
    """
    trace = None
    if case.recording is not None:
        kind, name = case.recording
        path = data / name
        trace = f"{kind}:{path if case.model is None else only_model(path, case.model, folder)}"
    strategy, own = POINTS[variant]
    loaded = load_scenario(scenario, trace=trace, settings=(*case.all_settings(), *own, *more))
    return loaded.with_strategy(strategy)


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
