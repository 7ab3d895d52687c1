"""`tidepool`: every process of the system, and commands that talk to its API."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ops.cli import (
    audit,
    batches,
    deletes,
    demand,
    events,
    faults,
    fleet,
    forecast_backtest,
    forecast_import,
    init,
    keys,
    latencies,
    logs,
    models,
    node_bench,
    node_check,
    node_profile,
    pins,
    plan_plot,
    plan_solve,
    plans,
    processes,
    requests,
    simulate,
    spot,
    tenants,
    top,
    usage,
)
from ops.client.api import CommandError, Target
from ops.version import version_text

app = typer.Typer(
    name="tidepool",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
processes.register(app)
app.command("init")(init.init)
app.command("status")(fleet.show_status)
app.command("top")(top.show_top)
app.command("events")(events.show_events)
app.command("audit")(audit.show_audit)
app.command("usage")(usage.show_usage)
app.command("logs")(logs.show_logs)
models.models.command("delete")(deletes.delete_model)
fleet.endpoints.command("delete")(deletes.delete_endpoint)
fleet.regions.command("delete")(deletes.delete_region)
fleet.gpus.command("delete")(deletes.delete_gpu)
fleet.nodes.command("delete")(deletes.delete_node)
fleet.regions.command("latency")(latencies.set_latency)
fleet.regions.command("latencies")(latencies.list_latencies)
fleet.nodes.command("check")(node_check.check_node)
fleet.nodes.command("bench")(node_bench.bench_node)
fleet.nodes.command("profile")(node_profile.profile_node)
demand.forecasts.command("backtest")(forecast_backtest.backtest_file)
plans.plans.command("plot")(plan_plot.plot_plan)
plans.plans.command("solve")(plan_solve.solve)
plans.plans.command("schema")(plan_solve.print_schema)
demand.forecasts.command("import")(forecast_import.import_recording)
for name, group in (
    ("region", fleet.regions),
    ("gpu", fleet.gpus),
    ("node", fleet.nodes),
    ("model", models.models),
    ("endpoint", fleet.endpoints),
    ("instance", fleet.instances),
    ("spot", spot.spot),
    ("demand", demand.demands),
    ("forecast", demand.forecasts),
    ("plan", plans.plans),
    ("pin", pins.pins),
    ("batch", batches.batches),
    ("request", requests.requests),
    ("key", keys.keys),
    ("tenant", tenants.tenants),
    ("faults", faults.faults),
    ("simulate", simulate.simulations),
):
    app.add_typer(group, name=name)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            help="Where the API is; default: TIDEPOOL_URL, else http://127.0.0.1:TIDEPOOL_PORT, else that of the"
            " `tidepool up` of TIDEPOOL_HOME, else port 8080."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="API key; default: TIDEPOOL_ADMIN_KEY, else the admin key of TIDEPOOL_HOME/keys.json."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Tidepool serves many LLMs on one fleet of GPUs over several regions.

    \b
    Examples:
      tidepool demo                               run the main job once, end to end
      tidepool up                                 run everything on this machine
      tidepool init --migrate                     the first keys, for processes that run apart
      tidepool model add qwen3-8b --path /models/qwen3-8b --tokens-per-s H800=12000 --region us-east
      tidepool batch submit requests.jsonl -o results.jsonl
      tidepool plan dry-run                       what the coming hour needs, and why
      tidepool status --json                      every command that asks the API takes --json
    """
    context.obj = Target(url=url, key=key)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exit status: 0 well, 1 refused or failed, 2 used wrongly."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tidepool")
    except CommandError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
