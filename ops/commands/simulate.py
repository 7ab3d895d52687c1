"""`simulate`: what happens with this traffic, these GPUs and these policies."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.commands.api import CommandError
from ops.commands.screen import notes, output, print_fields, print_table

if TYPE_CHECKING:
    from ops.simulator.scenario import Scenario

_TELL_EVERY_S = 2.0


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario, as TOML.", dir_okay=False)],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's own.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.")] = None,
) -> None:
    """Simulate a scenario: the live service's own policies, in simulated time.

    \b
    The same scenario and seed give the same event log; its hash is printed.
    Service attainment: mean share of a request's time in which no token was overdue; a late token puts off the next.
    Token attainment: share of all tokens that came by their place in the schedule.

    \b
    Example:
      tidepool simulate ops/scenarios/simulate-small.toml --seed 7 --json out.json
    """
    from dataplane.profile import ProfileError  # noqa: PLC0415 - --help needs none of it
    from forecasts.importers.lines import DemandFileError  # noqa: PLC0415
    from ops.simulator.run import simulate as run  # noqa: PLC0415
    from ops.simulator.scenario import ScenarioError, load_scenario  # noqa: PLC0415

    try:
        loaded = load_scenario(scenario)
        document = run(loaded, seed=seed, told=_Progress(loaded)).document()
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise CommandError(str(error)) from error
    if json_out:
        try:
            json_out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{json_out}: {error.strerror}") from error
    show(document)


class _Progress:
    """Tells how far it is, and when it is likely to be over, on standard error."""

    def __init__(self, scenario: "Scenario") -> None:
        self._duration_s: float | None = getattr(scenario.traffic, "duration_s", None)
        self._began_s = self._told_s = time.monotonic()

    def __call__(self, now_s: float, requests: int) -> None:
        passed_s = time.monotonic() - self._began_s
        if time.monotonic() - self._told_s < _TELL_EVERY_S:
            return
        self._told_s = time.monotonic()
        words = f"{now_s:,.0f} s simulated, {requests:,} requests"
        if self._duration_s and now_s:
            share = min(1.0, now_s / self._duration_s)
            words += f", {share:.0%}, about {passed_s / share - passed_s:,.0f} s left"
        notes().print(words)


def show(document: dict[str, Any]) -> None:
    """The report, as tables."""
    print_table(
        f"{document['scenario']}, seed {document['seed']}",
        {
            "model": "model",
            "tier": "tier",
            "requests": "requests",
            "failed": "failed",
            "service att.": lambda row: f"{row['service_attainment']:.1%}",
            "token att.": lambda row: f"{row['token_attainment']:.1%}",
            "TTFT late": lambda row: f"{row['ttft_violations']:.1%}",
            "TTFT p50": lambda row: _time(row["ttft_s"], "p50"),
            "TTFT p95": lambda row: _time(row["ttft_s"], "p95"),
            "TBT p95": lambda row: _time(row["tbt_mean_s"], "p95"),
            "service p95": lambda row: _time(row["service_s"], "p95"),
        },
        document["rows"],
    )
    for reason, count in document["failures"].items():
        output().print(f"failed: {count:,} {reason}", markup=False)
    print_fields(
        [
            ("requests", f"{document['requests']:,} in {document['simulated_s']:,.0f} s"),
            ("attainment", f"{document['service_attainment']:.2%} service, {document['token_attainment']:.2%} token"),
            (
                "slots",
                f"{document['slots']}, busy {document['busy_share']:.1%}, {document['slot_hours']:,.2f} slot hours",
            ),
            ("switches", f"{document['switches']:,}"),
            ("event log", document["event_log_hash"]),
        ]
    )
    speed = (
        f"{document['requests_per_s']:,.0f} requests/s, {document['events']:,} events in {document['seconds']:.1f} s"
    )
    sys.stderr.write(speed + "\n")


def _time(quantiles: dict[str, float] | None, name: str) -> str:
    return "-" if quantiles is None else f"{quantiles[name]:.3g} s"
