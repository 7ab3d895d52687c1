"""Scaling strategies side by side on one fleet and one traffic: `python -m ops.bench.strategies SCENARIO`.

The figures of SageServe 7.2: instance hours, what scaling up wastes, TTFT, and how long a burst is felt. Each strategy
begins with the same instances and sees the same requests.
"""

import csv
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from dataplane.profile import ProfileError
from forecasts.importers.lines import DemandFileError, open_csv
from ops.simulator.results import Result
from ops.simulator.run import simulate
from ops.simulator.scenario import Scenario, ScenarioError, load_scenario
from ops.simulator.scenario_planning import Strategy

HIGH = 0.7
"""Above this effective memory utilization an endpoint is short of room."""


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """One strategy's run.

    Attributes:
        instance_hours: serving, warming and draining; spot ones are somebody else's.
        warming_hours: of those, what starts took.
        ttft_p95_s, late: of IW-F requests; `late` is the share whose first token was.
        iw_failed, niw_failed: shares of the requests that ended without an answer.
        high_minutes: minutes in which an endpoint was above `HIGH`, over all endpoints.
        high_longest: the longest that one was, in minutes.
        cpu_s: what the simulation took.
    """

    strategy: str
    requests: int
    instance_hours: float
    warming_hours: float
    spot_hours: float
    scale_outs: int
    ttft_p95_s: float
    late: float
    iw_failed: float
    niw_failed: float
    high_minutes: int
    high_longest: int
    cpu_s: float
    event_log_hash: str


def figures_of(result: Result, cpu_s: float) -> StrategyFigures:
    """What a table says of a run."""
    hours = result.totals.gpu_hours
    tiers = {row.tier: row for row in result.tiers}
    urgent = tiers.get("IW-F")
    high = [[(value or 0.0) > HIGH for value in one.utilization] for one in result.series.endpoints]
    interactive = [row for row in result.tiers if row.tier != "NIW"]
    return StrategyFigures(
        strategy=result.strategy or "none",
        requests=result.requests,
        instance_hours=sum(hours.get(state, 0.0) for state in ("serving", "warming", "draining")),
        warming_hours=hours.get("warming", 0.0),
        spot_hours=hours.get("spot", 0.0),
        scale_outs=result.totals.scale_outs,
        ttft_p95_s=urgent.ttft_s.p95 if urgent and urgent.ttft_s else float("nan"),
        late=urgent.ttft_violations if urgent else 0.0,
        iw_failed=sum(row.failed for row in interactive) / max(1, sum(row.requests for row in interactive)),
        niw_failed=tiers["NIW"].failed / tiers["NIW"].requests if "NIW" in tiers else 0.0,
        high_minutes=sum(map(sum, high)),
        high_longest=max(map(_longest, high), default=0),
        cpu_s=cpu_s,
        event_log_hash=result.event_log_hash,
    )


def _longest(flags: list[bool]) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def compare(scenario: Scenario, strategy: str, seed: int | None) -> StrategyFigures:
    """Run a strategy."""
    began_s = time.process_time()
    result = simulate(scenario.with_strategy(strategy), seed=seed).result
    return figures_of(result, time.process_time() - began_s)


def only_model(trace: str, model: str, folder: Path) -> str:
    """A recording (FORMAT:PATH) that holds one of its models only, by its column `model`.

    Raises:
        DemandFileError: the file cannot be read, or has no such model.
    """
    kind, _, path = trace.partition(":")
    out, found = folder / "one-model.csv", 0
    with open_csv(Path(path)) as file, out.open("w", newline="", encoding="utf-8") as written:
        writer = csv.writer(written)
        writer.writerow(file.header)
        for line in file.lines(("model", *file.header)):
            if line.word("model") == model:
                writer.writerow([line.text(column) for column in file.header])
                found += 1
    if not found:
        raise DemandFileError(f"{path}: column model: no row says {model!r}")
    return f"{kind}:{out}"


def main(
    scenario: Annotated[Path, typer.Argument(help="A scenario with [scaling].", dir_okay=False, exists=True)],
    trace: Annotated[str | None, typer.Option(help="A recording as FORMAT:PATH, in place of its traffic.")] = None,
    model: Annotated[str | None, typer.Option(help="Of the recording, this model only.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="A key, as planning.learn_s=86400.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Only these; by default all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's own.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", dir_okay=False)] = None,
) -> None:
    """Instance hours, wasted starts and TTFT of scaling strategies.

    \b
    Example:
      python -m ops.bench.strategies ops/scenarios/strategies.toml --trace sageserve:WEEK.csv.gz --model A
    """
    if model is not None and trace is None:
        raise typer.BadParameter("needs --trace", param_hint="--model")
    rows: list[StrategyFigures] = []
    try:
        with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
            chosen = only_model(trace, model, Path(folder)) if trace is not None and model is not None else trace
            loaded = load_scenario(scenario, trace=chosen, settings=setting or ())
            for name in strategy or get_args(Strategy):
                rows.append(compare(loaded, name, seed))
                show(rows[-1])
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_out:
        json_out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def show(row: StrategyFigures) -> None:
    """A line as soon as it is known."""
    print(
        f"{row.strategy:>8}: {row.instance_hours:6.1f} instance-h, {row.warming_hours:5.2f} warming,"
        f" {row.scale_outs:4} outs, TTFT p95 {row.ttft_p95_s:6.2f} s, {row.late:5.1%} late, failed {row.iw_failed:.2%}"
        f" IW {row.niw_failed:.2%} NIW, {row.high_minutes:4} min over 70 % ({row.high_longest} at once),"
        f" {row.cpu_s:.0f} CPU s"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
