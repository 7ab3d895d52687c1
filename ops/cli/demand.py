"""`demand` and `forecast`."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.forecast_backtest import backtest_file
from ops.cli.forecast_import import import_recording, reading, send_demand, show_import
from ops.client.api import CommandError, connected
from ops.client.screen import AsJson, Columns, print_json, print_list, print_table, same, time_text

CHUNK_BYTES = 2**18
demands = typer.Typer(no_args_is_help=True, help="Demand: input tokens per second, by model, region and minute.")
forecasts = typer.Typer(no_args_is_help=True, help="Forecasts of the coming hour's peaks.")

Kind = Annotated[str, typer.Option(metavar="IW|NIW", help="Interactive (IW) or deferred (NIW) demand.")]


@demands.command("import")
@examples("tidepool demand import week.csv")
def import_demand(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="CSV, or CSV in .gz.")],
    kind: Kind = "IW",
    as_json: AsJson = False,
) -> None:
    """Import demand from a CSV with the columns start_s, region, model, tokens_per_s; all of it or nothing.

    \b
    start_s is the Unix time of a whole minute; an empty tokens_per_s is a gap.
    """
    with file.open("rb") as raw, reading(file) as report:

        def chunks() -> Iterator[bytes]:
            source: Any = gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw
            for chunk in _pieces(source, file):
                yield chunk
                report(raw.tell())

        answer = send_demand(context, chunks(), kind)
    show_import(answer, as_json=as_json)


@demands.command("show")
@examples("tidepool demand show llama-8b us-east")
def show_demand(
    context: typer.Context,
    model: str,
    region: str,
    kind: Kind = "IW",
    since_s: Annotated[int | None, typer.Option(min=0, help="Unix time; default: a day before --until-s.")] = None,
    until_s: Annotated[int | None, typer.Option(min=0, help="Unix time; default: the newest known.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show an endpoint's demand, hour by hour."""
    with connected(context) as api:
        answer = api.get("/admin/demand", model=model, region=region, kind=kind, since_s=since_s, until_s=until_s)
    if as_json:
        print_json(answer)
        return
    hours: dict[int, list[float]] = {}
    for point in answer["data"]:
        hours.setdefault(point["start_s"] // 3600 * 3600, []).append(point["tokens_per_s"])
    rows = [
        {"hour": time_text(hour), "minutes": len(values), "mean": sum(values) / len(values), "peak": max(values)}
        for hour, values in sorted(hours.items())
    ]
    columns: Columns = {"hour": "hour", "minutes known": "minutes", "mean tokens/s": "mean", "peak tokens/s": "peak"}
    print_table(f"Demand of {model} in {region}", columns, rows)


@forecasts.command("list")
@examples("tidepool forecast list")
def list_forecasts(
    context: typer.Context,
    origin_s: Annotated[int | None, typer.Option(min=0, help="Unix time of the origin; default: newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the forecasts of one origin."""
    with connected(context) as api:
        answer = api.get("/admin/forecasts", origin_s=origin_s)
    columns: Columns = {
        **same("model", "region"),
        "median peak": "peak_q50",
        "upper peak": "peak_upper",
        "by": "forecaster",
        "why": "reason",
    }
    print_list(f"Forecasts from {time_text(answer['origin_s'])}, tokens/s", columns, answer, as_json=as_json)


@forecasts.command("run")
@examples("tidepool forecast run")
def run_forecasts(
    context: typer.Context,
    origin_s: Annotated[int | None, typer.Option(min=0, help="Unix time to forecast from; default: now.")] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast every series now."""
    with connected(context) as api:
        answer = api.post("/admin/forecasts/run", {} if origin_s is None else {"origin_s": origin_s})
    if as_json:
        print_json(answer)
        return
    origin = answer["origin_s"]
    typer.echo(f"forecasting from {time_text(origin)}; see: tidepool forecast list --origin-s {origin}")


def _pieces(source: IO[bytes], file: Path) -> Iterator[bytes]:
    try:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk
    except (OSError, EOFError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error


forecasts.command("backtest")(backtest_file)
forecasts.command("import")(import_recording)
