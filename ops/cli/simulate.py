"""`simulate`: what happens with this traffic, these GPUs and these policies."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ops.cli.examples import examples
from ops.cli.simulate_compare import Report, compare_results
from ops.cli.simulate_live import write_live_scenario
from ops.client.api import CommandError
from ops.client.screen import notes, output, print_fields, print_table, same

if TYPE_CHECKING:
    from ops.simulator.results.results import GpuTotals, Result, Totals
    from ops.simulator.scenario.scenario import Scenario

_REPORT_EVERY_S = 2.0


class DefaultRunGroup(TyperGroup):
    """`GROUP X` is short for `GROUP run X`, unless X is one of the commands or asks for help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


simulations = typer.Typer(
    cls=DefaultRunGroup,
    no_args_is_help=True,
    help="Simulate a fleet on the live service's own policies. `simulate X` is short for `simulate run X`.",
)
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the scenario, such as policy.order=edf; repeatable."),
]
Trace = Annotated[
    str | None,
    typer.Option(metavar="FORMAT:PATH", help="A recording instead of the scenario's traffic: formats above."),
]
FromLive = Annotated[
    bool, typer.Option("--from-live", help="Build the scenario from the running fleet and its recent demand.")
]
Save = Annotated[
    Path | None, typer.Option(dir_okay=False, help="With --from-live: keep the scenario here, to edit and run again.")
]
Hours = Annotated[
    int | None,
    typer.Option(min=1, max=168, help="With --from-live: hours of its demand to replay; default: 24."),
]

Facts = Annotated[
    Path | None,
    typer.Option("--facts", hidden=True, dir_okay=False, help="With --from-live: read the fleet here, not of the API."),
]
ProgressLines = Annotated[
    bool, typer.Option("--progress-lines", hidden=True, help="Report progress as lines of JSON on standard error.")
]

GpuTypes = Annotated[
    list[str] | None,
    typer.Option("--gpu-type", help="With --from-live: only its nodes of this type; repeatable; default: all."),
]


@simulations.command("run")
@examples(
    "tidepool simulate run ops/scenarios/simulate-small.toml --seed 7 --json out.json --report out.html",
    "tidepool simulate day.toml --trace azure-2024:week.csv.gz --set traffic.scale=0.1 --set traffic.until_s=86400",
    "tidepool simulate day.toml --policy lt-u --set 'failures=[{ region = \"us-east\", at_s = 43200, down_s = 3600 }]'",
    "tidepool simulate ops/scenarios/simulate-types.toml --set fleet.cost_per_hour.H20=2.5 --report types.html",
    "tidepool simulate --from-live --hours 168 --save week.toml --json lt-i.json",
    "tidepool simulate week.toml --policy lt-u --json lt-u.json",
)
def simulate(
    context: typer.Context,
    scenario: Annotated[Path | None, typer.Argument(help="A scenario, as TOML.", dir_okay=False)] = None,
    from_live: FromLive = False,
    save: Save = None,
    hours: Hours = None,
    gpu_type: GpuTypes = None,
    trace: Trace = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's own.")] = None,
    policy: Annotated[str | None, typer.Option(help="The scaling strategy, instead of the scenario's own.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.")] = None,
    report: Report = None,
    facts: Facts = None,
    progress_lines: ProgressLines = False,
) -> None:
    """Simulate a scenario: the live service's own policies, in simulated time.

    \b
    The same scenario and seed give the same event log; its hash is printed.
    Service attainment: mean share of a request's time in which no token was overdue; a late token puts off the next.
    Token attainment: share of all tokens that were on schedule.
    A fleet that is scaled may have GPUs of several types: see ops/scenarios/simulate-types.toml; or pools
    that follow the plans: simulate-pools.toml.

    \b
    Recordings; the scenario's [traffic] sets what they leave open (origins, models, tiers, scale, from_s, until_s):
      azure-2023  Azure's trace, a line for each request
      azure-2024  the same of 2024, or its requests per 10 s
      sageserve   prompt tokens per minute: Poisson requests of the mean of traffic.prompt_tokens; "dev" is NIW
      servegen    one model's clients by 10 minutes, spread over the regions (traffic.lengths: their lengths)
      aegaeon     one workload, by name: --set traffic.workload=synth-40-0.1-1.0-1.0
      burstgpt, mooncake   a line for each request
      csv         start_s,region,model,tokens_per_s[,tier], as `tidepool forecast import` writes it
    """
    if from_live == (scenario is not None):
        raise CommandError("give either a scenario or --from-live")
    if not from_live and (save or hours or gpu_type or facts):
        raise CommandError("--save, --hours and --gpu-type need --from-live")
    for path in filter(None, (save, json_out, report)):
        if not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: cannot be written: its folder does not exist")
    progress = _ProgressLines if progress_lines else _Progress
    wanted: dict[str, Any] = {"trace": trace, "settings": settings, "seed": seed, "policy": policy}
    with _scenario_file(
        context, scenario or save, hours=hours, gpu_types=gpu_type, live=from_live, facts=facts
    ) as path:
        result = _simulated(path, **wanted, json_out=json_out, report=report, progress=progress)
    show(result)


def _simulated(
    path: Path,
    *,
    trace: str | None,
    settings: list[str] | None,
    seed: int | None,
    policy: str | None,
    json_out: Path | None,
    report: Path | None,
    progress: "type[_Progress]",
) -> "Result":
    """Simulate the scenario of a file, and write its result to the given files."""
    from dataplane.scheduling.profile import ProfileError
    from forecasts.importers.lines import DemandFileError
    from ops.plots.pages import PageError, write_page
    from ops.simulator.results.report import report as page_of
    from ops.simulator.run import simulate as run
    from ops.simulator.scenario.scenario import ScenarioError, load_scenario

    try:
        loaded = load_scenario(path, trace=trace, settings=settings or ())
        if policy is not None:
            loaded = loaded.with_strategy(policy)
        result = run(loaded, seed=seed, report=progress(loaded)).result
        if not result.requests:
            raise CommandError(f"{loaded.name}: no request arrived: see [traffic] and planning.learn_s")
        if json_out:
            write_page(json_out, result.model_dump_json(indent=1) + "\n")
        if report:
            write_page(report, page_of(result))
    except (ScenarioError, ProfileError, DemandFileError, PageError) as error:
        raise CommandError(str(error)) from error
    return result


@contextmanager
def _scenario_file(
    context: typer.Context,
    path: Path | None,
    *,
    hours: int | None,
    gpu_types: list[str] | None,
    live: bool,
    facts: Path | None,
) -> Iterator[Path]:
    """The file of the scenario; one made from the live fleet is written to `path`, or to a temporary folder."""
    with TemporaryDirectory() as folder:
        chosen = path or Path(folder) / "live.toml"
        if live:
            write_live_scenario(context, chosen, hours=hours or 24, gpu_types=gpu_types or (), facts=facts)
        yield chosen


class _Progress:
    """Reports progress and the expected time left on standard error."""

    def __init__(self, scenario: "Scenario") -> None:
        self._duration_s: float | None = getattr(scenario.traffic, "duration_s", None)
        self._began_s = self._reported_s = time.monotonic()

    def __call__(self, now_s: float, requests: int) -> None:
        passed_s = time.monotonic() - self._began_s
        if time.monotonic() - self._reported_s < _REPORT_EVERY_S:
            return
        self._reported_s = time.monotonic()
        self._report(now_s, requests, passed_s)

    def _report(self, now_s: float, requests: int, passed_s: float) -> None:
        text = f"{now_s:,.0f} s simulated, {requests:,} requests"
        if self._duration_s and now_s:
            share = min(1.0, now_s / self._duration_s)
            text += f", {share:.0%}, about {passed_s / share - passed_s:,.0f} s left"
        notes().print(text)


class _ProgressLines(_Progress):
    """The same for a program that reads it. Once nobody reads any more, writing fails, and so does the simulation."""

    def _report(self, now_s: float, requests: int, passed_s: float) -> None:
        share = min(1.0, now_s / self._duration_s) if self._duration_s else 0.0
        sys.stderr.write(json.dumps({"share": share, "requests": requests}) + "\n")
        sys.stderr.flush()


def show(result: "Result") -> None:
    """The result, as tables."""
    strategy = f", {result.strategy}" if result.strategy else ""
    print_table(
        f"{result.scenario}{strategy}, seed {result.seed}",
        {
            **same("model", "tier", "requests", "failed"),
            "service att.": lambda row: f"{row['service_attainment']:.1%}",
            "token att.": lambda row: f"{row['token_attainment']:.1%}",
            "TTFT late": lambda row: f"{row['ttft_violations']:.1%}",
            "TTFT p50": lambda row: _time(row["ttft_s"], "p50"),
            "TTFT p95": lambda row: _time(row["ttft_s"], "p95"),
            "TBT p95": lambda row: _time(row["tbt_mean_s"], "p95"),
            "service p95": lambda row: _time(row["service_s"], "p95"),
        },
        [row.model_dump() for row in result.rows],
    )
    for reason, count in result.failures.items():
        output().print(f"failed: {count:,} {reason}", markup=False)
    totals = result.totals
    starts = ", ".join(f"{count:,} {start}" for start, count in sorted(totals.starts.items()))
    print_fields(
        [
            ("requests", f"{result.requests:,} in {result.simulated_s:,.0f} s"),
            ("attainment", f"{result.service_attainment:.2%} service, {result.token_attainment:.2%} token"),
            ("slots", f"{result.slots}, busy {result.busy_share:.1%}, {result.slot_hours:,.2f} slot hours"),
            ("GPU hours", _hours(totals)),
            *((f"on {name}", _hours(one)) for name, one in totals.gpu_types.items() if len(totals.gpu_types) > 1),
            *([("scaling", f"{totals.scale_outs:,} out, {totals.scale_ins:,} in; starts: {starts}")] * bool(starts)),
            ("switches", f"{totals.switches:,}"),
            ("event log", result.event_log_hash),
        ]
    )
    speed = f"{result.requests_per_s:,.0f} requests/s, {result.events:,} events in {result.seconds:.1f} s"
    sys.stderr.write(speed + "\n")


simulations.command("compare")(compare_results)


def _hours(totals: "Totals | GpuTotals") -> str:
    hours = ", ".join(f"{hours:,.1f} {state}" for state, hours in sorted(totals.gpu_hours.items()))
    return f"{hours or 'none'}; ${totals.cost:,.2f}"


def _time(quantiles: dict[str, float] | None, name: str) -> str:
    return "-" if quantiles is None else f"{quantiles[name]:.3g} s"
