"""`what-if`: simulations of the running fleet with changes, made by its forecasters."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ops.cli.deletes import delete_run
from ops.cli.examples import examples
from ops.cli.ids import RunId, whole_id
from ops.cli.listing import Limit, newest
from ops.cli.simulate_compare import print_lines
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.console import console_link, open_page
from ops.client.polling import reread
from ops.client.screen import AsJson, Columns, print_fields, print_json, print_list, print_table, progress_bar
from ops.client.times import utc_text

_ENDED = frozenset({"completed", "failed", "cancelled"})
_ALL = "*"
runs = typer.Typer(
    no_args_is_help=True, help="What-if runs: the running fleet simulated with changes, by its forecasters."
)
Web = Annotated[bool, typer.Option("--web", help="Print the link to it in the console, and open it.")]
Changes = list[str] | None


@runs.command("run")
@examples(
    'tidepool what-if run "half of us-east" --capacity us-east=0.5 --hours 6',
    "tidepool what-if run \"H200 instead\" --capacity '*,H100=0' --capacity '*,H200=2' --price H200=3.2",
    'tidepool what-if run "us-east fails at noon" --lose-region us-east=12+2 --strategy lt-ua --no-wait',
)
def run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    hours: Annotated[int, typer.Option(help="The last hours of demand, which come again: 1 to 168.")] = 24,
    strategy: Annotated[
        str | None, typer.Option(help="Scale by this: lt-i, lt-u, lt-ua, lt-d, reactive, siloed or chiron.")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Begin with the instances that this plan wants.")] = None,
    capacity: Annotated[
        Changes,
        typer.Option(metavar="[REGION[,GPU]=]FACTOR", help="So many times as many nodes; * is any. Repeatable."),
    ] = None,
    price: Annotated[
        Changes, typer.Option(metavar="GPU=COST", help="US dollars that a GPU costs per hour. Repeatable.")
    ] = None,
    demand: Annotated[
        Changes,
        typer.Option(metavar="[REGION[,MODEL]=]FACTOR", help="So many times as much demand; * is any. Repeatable."),
    ] = None,
    lose_region: Annotated[
        Changes,
        typer.Option(
            metavar="REGION=AFTER+FOR", help="All its nodes fail after so many hours, for so many. Repeatable."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended, and show progress.")] = True,
    as_json: AsJson = False,
) -> None:
    """Simulate the running fleet with changes. Nothing of the fleet is touched.

    \b
    Ctrl-C stops waiting, not the run: `tidepool what-if cancel` does.
    """
    changes = {
        "strategy": strategy,
        "capacity": _each("--capacity", capacity, lambda text: _scaled(text, "gpu_type")),
        "prices": _each("--price", price, _price),
        "demand": _each("--demand", demand, lambda text: _scaled(text, "model")),
        "lost_regions": _each("--lose-region", lose_region, _lost),
    }
    with connected(context) as api:
        if plan is not None:
            changes["plan_id"] = whole_id(api, "plan", plan)
        made = api.post("/admin/what-if", {"name": name, "hours": hours, "changes": changes})
        made = _wait(api, made) if wait else made
    _show(made, as_json=as_json)
    if made["state"] in _ENDED - {"completed"}:
        raise CommandError(f"{made['id']} is {made['state']}{': ' + made['error'] if made['error'] else ''}")


@runs.command("list")
@examples("tidepool what-if list --state completed")
def list_runs(
    context: typer.Context,
    state: Annotated[
        str | None, typer.Option(help="Only these: queued, running, completed, failed or cancelled.")
    ] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List what-if runs, the newest first."""
    with connected(context) as api:
        rows = newest(api, "/admin/what-if", limit, state=state)
    columns: Columns = {
        "run": "id",
        "name": "name",
        "state": _state_text,
        "hours": "hours",
        "changes": lambda row: "; ".join(_words(row["changes"])) or "none",
        "by": "created_by",
        "created": lambda row: utc_text(row["created_at"]),
    }
    print_list("What-if runs", columns, {"data": rows}, as_json=as_json)


@runs.command("show")
@examples("tidepool what-if show latest", "tidepool what-if show latest --web")
def show(context: typer.Context, run_id: RunId = "latest", web: Web = False, as_json: AsJson = False) -> None:
    """Show a run and its figures. By default the newest."""
    with connected(context) as api:
        run_id = whole_id(api, "whatif", run_id)
        if web:
            open_page(console_link(api, "what-if", run_id))
            return
        found = api.get(path_to("/admin/what-if", run_id))
    _show(found, as_json=as_json)


@runs.command("compare")
@examples("tidepool what-if compare whatif_0190f3c2 latest")
def compare(context: typer.Context, a: RunId, b: RunId, web: Web = False, as_json: AsJson = False) -> None:
    """Compare two completed runs: every figure of both, and how the second differs.

    \b
    They compare exactly only if the fleet and its demand did not change between them. Differences of percentages are
    in points (pt).
    """
    from ops.simulator.results.compare import compare as lines_of
    from ops.simulator.results.kept import result_of
    from ops.simulator.results.results import ResultError

    with connected(context) as api:
        ids = [whole_id(api, "whatif", each) for each in (a, b)]
        if web:
            open_page(f"{console_link(api, 'what-if')}?runs={','.join(ids)}")
            return
        before, after = (api.get(path_to("/admin/what-if", each)) for each in ids)
    try:
        lines = lines_of(result_of(before), result_of(after))
    except ResultError as error:
        raise CommandError(str(error)) from error
    names = (before["name"], after["name"])
    print_lines(names if names[0] != names[1] else (before["id"], after["id"]), lines, as_json=as_json)


@runs.command("cancel")
@examples("tidepool what-if cancel latest")
def cancel(context: typer.Context, run_id: RunId, as_json: AsJson = False) -> None:
    """Cancel a run: its simulation ends within seconds. One that has ended stays as it is."""
    with connected(context) as api:
        _show(api.post(path_to("/admin/what-if", whole_id(api, "whatif", run_id), "cancel")), as_json=as_json)


runs.command("delete")(delete_run)


def _wait(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    with progress_bar(made["state"]) as report:
        while True:
            report(f"{made['state']}, %", int(100 * made["progress"]), 100)
            if made["state"] in _ENDED:
                return made
            made = reread(api, path_to("/admin/what-if", made["id"]))


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    print_fields(
        [
            ("run", found["id"]),
            ("name", found["name"]),
            ("state", _state_text(found)),
            ("error", found["error"]),
            ("demand", f"the last {found['hours']} h, once more"),
            ("changes", "; ".join(_words(found["changes"])) or "none"),
            ("by", found["created_by"]),
            *((name, utc_text(found[f"{name}_at"])) for name in ("created", "started", "ended")),
            ("event log", found["event_log_hash"]),
        ]
    )
    if found.get("result") is not None:
        _show_figures(found)


def _show_figures(found: dict[str, Any]) -> None:
    from ops.simulator.results.compare import compare as lines_of
    from ops.simulator.results.kept import result_of
    from ops.simulator.results.results import ResultError

    try:
        result = result_of(found)
    except ResultError as error:
        raise CommandError(f"{error}; --json prints them") from error
    columns: Columns = {"figure": "name", "value": "value"}
    rows = [{"name": line.name, "value": line.texts()[0]} for line in lines_of(result, result)]
    print_table("Figures", columns, rows)


def _state_text(row: Mapping[str, Any]) -> str:
    return f"running, {row['progress']:.0%}" if row["state"] == "running" else str(row["state"])


def _words(changes: Mapping[str, Any]) -> list[str]:
    """Each change, as its option is written."""
    return [
        *([f"strategy {changes['strategy']}"] if changes["strategy"] else []),
        *([f"plan {changes['plan_id']}"] if changes["plan_id"] else []),
        *(f"capacity {_place(each, 'gpu_type')}={each['factor']:g}" for each in changes["capacity"]),
        *(f"price {each['gpu_type']}={each['cost_per_hour']:g}" for each in changes["prices"]),
        *(f"demand {_place(each, 'model')}={each['factor']:g}" for each in changes["demand"]),
        *(f"lose-region {each['region']}={each['after_h']:g}+{each['down_h']:g}" for each in changes["lost_regions"]),
    ]


def _place(change: Mapping[str, Any], thing: str) -> str:
    return ",".join([change["region"] or _ALL, *([change[thing]] if change[thing] else [])])


def _each(option: str, texts: Changes, read: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """What each text of an option says. Whether names and figures are allowed, the API decides."""
    found = []
    for text in texts or []:
        try:
            found.append(read(text))
        except ValueError as error:
            raise typer.BadParameter(f"'{text}': {error}", param_hint=option) from None
    return found


def _scaled(text: str, thing: str) -> dict[str, Any]:
    place, _, factor = text.rpartition("=")
    region, _, name = place.partition(",")
    names = {"region": region, thing: name}
    chosen = {field: None if value in ("", _ALL) else value for field, value in names.items()}
    return chosen | {"factor": _number(factor, "a factor")}


def _price(text: str) -> dict[str, Any]:
    gpu_type, _, cost = text.rpartition("=")
    if not gpu_type:
        raise ValueError("write it like H100=2.5")
    return {"gpu_type": gpu_type, "cost_per_hour": _number(cost, "a price")}


def _lost(text: str) -> dict[str, Any]:
    region, _, times = text.rpartition("=")
    after, plus, down = times.partition("+")
    if not region or not plus:
        raise ValueError("write it like us-east=12+2: lost after 12 hours, for 2")
    return {"region": region, "after_h": _number(after, "hours"), "down_h": _number(down, "hours")}


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is no number for {what}") from None
    if not -1e300 < number < 1e300:
        raise ValueError(f"{what} must be a finite number")
    return number
