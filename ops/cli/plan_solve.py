"""`plan solve` and `plan schema`: the placement of a problem in a file, without any server."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from ops.cli.examples import examples
from ops.client.api import CommandError
from ops.client.screen import AsJson, Columns, notes, output, print_fields, print_json, print_table, same

if TYPE_CHECKING:
    from controlplane.policies.placement.decision import Placement
    from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings

EXAMPLE = Path(__file__).parents[1] / "scenarios" / "problem-small.json"


@examples("tidepool plan schema --example > problem.json", "tidepool plan solve problem.json --gap 0.001 --json")
def solve(
    problem: Annotated[Path, typer.Argument(help="A problem as JSON; - reads standard input.", allow_dash=True)],
    gap: Annotated[
        float | None, typer.Option(min=0, help="Proven distance to the optimum that will do, as a share of the cost.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(min=0, help="Seconds the solver may take.")] = None,
    lp: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the integer program here, as LP.")] = None,
    as_json: AsJson = False,
) -> None:
    """Solve a placement problem offline: how many instances of what, where, in which pools, and why.

    \b
    The file's schema: tidepool plan schema. Both options override the file.
    What cannot be served is listed; that is an answer too. Exit status 1: refused, or no solver answered.
    """
    from controlplane.policies.placement.choose import choose_placement

    facts, settings = _read(problem, gap, time_limit)
    if lp is not None:
        _write_lp(facts, settings, lp)
    began_s = time.perf_counter()
    with notes().status(f"placing {len(facts.models)} models in {len(facts.regions)} regions ..."):
        placement = choose_placement(
            facts,
            time.time(),
            settings,
            should_stop=lambda: time.perf_counter() - began_s > settings.time_limit_s,
        )
    answer = answer_of(placement, seconds=time.perf_counter() - began_s)
    if as_json:
        print_json(answer)
    else:
        _show(answer)
    if placement.objective_per_hour is None:
        raise CommandError(f"not solved: {placement.reason}")


@examples("tidepool plan schema > problem.schema.json")
def print_schema(
    example: Annotated[bool, typer.Option("--example", help="Print a small problem instead.")] = False,
    as_json: AsJson = True,  # it is JSON either way
) -> None:
    """Print the JSON schema of a placement problem."""
    from controlplane.policies.placement.document_schema import schema

    if example:
        typer.echo(EXAMPLE.read_text(), nl=False)
    else:
        print_json(schema())


def _read(problem: Path, gap: float | None, time_limit_s: float | None) -> "tuple[PlacementFacts, PlacementSettings]":
    from controlplane.policies.placement.document import parse

    try:
        text = sys.stdin.buffer.read() if str(problem) == "-" else problem.read_bytes()
        facts, settings = parse(text)
    except OSError as error:
        raise CommandError(f"{problem}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{problem}: {error}") from error
    try:
        return facts, replace(
            settings,
            gap=settings.gap if gap is None else gap,
            time_limit_s=settings.time_limit_s if time_limit_s is None else time_limit_s,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


def _write_lp(facts: "PlacementFacts", settings: "PlacementSettings", path: Path) -> None:
    from controlplane.policies.placement.exact.program import Program
    from controlplane.policies.placement.grid import grid_of

    try:
        Program(grid_of(facts, settings)).problem.writeLP(str(path))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error


def answer_of(placement: "Placement", *, seconds: float) -> dict[str, Any]:
    """A placement as `plan solve --json` prints it. `placement` in it has the form of a problem's `present`."""
    entries = [_row(entry) | {"change": entry.after - entry.before} for entry in placement.entries]
    where = ("model", "region", "gpu")
    return {
        "status": placement.status,
        "solver": placement.solver,
        "reason": placement.reason,
        "objective": placement.objective_per_hour,
        "bound": placement.bound_per_hour,
        "gap": placement.gap,
        "seconds": seconds,
        "gpu_cost_per_hour": placement.gpu_cost_per_hour,
        "changes": [entry for entry in entries if entry["change"]],
        "unchanged": [entry for entry in entries if not entry["change"]],
        "placement": [
            {name: entry[name] for name in where} | {"count": entry["after"]} for entry in entries if entry["after"]
        ],
        "pools": [_row(pool) for pool in placement.pools],
        "pooled": [_row(each) for each in placement.pooled],
        "unserved": [_row(each) for each in placement.unserved],
        "below_minimum": [_row(each) for each in placement.below_minimum],
    }


def _row(record: Any) -> dict[str, Any]:
    """The fields of a part of a placement, under the names of a problem: `endpoint` is model and region."""
    fields: dict[str, Any] = to_builtins(record)
    row: dict[str, Any] = fields.pop("endpoint", {})
    if "gpu_type" in fields:
        row["gpu"] = fields.pop("gpu_type")
    return row | fields


def _show(answer: dict[str, Any]) -> None:
    gap = "unknown" if answer["gap"] is None else f"{answer['gap']:.3%}"
    print_fields(
        [
            ("status", answer["status"]),
            ("solver", f"{answer['solver']}: {answer['reason']}"),
            ("objective per hour", answer["objective"]),
            ("bound", answer["bound"]),
            ("gap", gap),
            ("GPUs per hour", answer["gpu_cost_per_hour"]),
            ("seconds", answer["seconds"]),
        ]
    )
    changes: Columns = {
        **same("model", "region"),
        "GPU": "gpu",
        "now": "before",
        "plan": "after",
        "constraint": "constraint",
        "cost if not": "cost_if_not",
        "why": "reason",
    }
    pools: Columns = {"region": "region", "GPU": "gpu", "now": "before", "plan": "after"}
    pooled: Columns = {
        **same("model", "region"),
        "GPU": "gpu",
        "share": "occupancy",
        "now": lambda row: "pooled" if row["before"] else "",
        "cost if not": "cost_if_not",
        "why": "reason",
    }
    print_table("Changes", changes, answer["changes"])
    output().print(f"{len(answer['unchanged'])} counts stay as they are.")
    print_table("Pool GPUs", pools, answer["pools"])
    print_table("Pooled", pooled, answer["pooled"])
    unserved: Columns = {"model": "model", "region": "region", "tokens/s": "tokens_per_s", "why": "reason"}
    print_table("Not served", unserved, answer["unserved"])
    below: Columns = {"model": "model", "region": "region", "wanted": "minimum", "plan": "placed", "why": "reason"}
    print_table("Below minimum or pin", below, answer["below_minimum"])
