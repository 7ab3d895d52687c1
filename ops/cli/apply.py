"""`apply` and `export`: the fleet as one file."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ops.cli.examples import examples
from ops.client.api import CommandError, connected
from ops.client.fleet_file.applying import Applied, apply_changes
from ops.client.fleet_file.changes import Change, choose_changes, missing_references
from ops.client.fleet_file.document import FleetFile
from ops.client.fleet_file.exporting import export_text
from ops.client.fleet_file.pruning import choose_deletions, read_open_batches
from ops.client.fleet_file.reading import read_fleet_file, says_nothing
from ops.client.fleet_file.resources import declared_resources, read_resources
from ops.client.screen import AsJson, print_json

_OWNER = "apply"
_SIGNS = {"create": "+", "change": "~", "delete": "-"}


@examples(
    "tidepool apply -f fleet.yaml --dry-run        what would change, field by field",
    "tidepool apply -f fleet.yaml                  change it; a second run changes nothing",
    "tidepool export | tidepool apply -f -         changes nothing",
    "tidepool apply -f fleet.yaml --prune          deletes what the file made before and names no more",
)
def apply_file(
    context: typer.Context,
    file: Annotated[Path, typer.Option("--file", "-f", help="The file; -: standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete what its owner made before and the file names no more.")
    ] = False,
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="To whom new things belong; default: the file's owner, or apply.")
    ] = None,
    adopt: Annotated[bool, typer.Option("--adopt", help="All that the file names belongs to its owner.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the fleet and its tenants as a YAML file declares them."""
    text = _text(file)
    fleet_file = read_fleet_file(text, name=_name(file))
    if prune and says_nothing(text):  # such as the file of an export that failed
        raise CommandError(f"{_name(file)} is empty: write {{}} in it to delete all that its owner made")
    owner = _owner(owner) or fleet_file.owner or _OWNER
    declared = declared_resources(fleet_file, now=datetime.now(UTC))
    with connected(context) as api:
        present = read_resources(api)
        if missing := missing_references(present, declared):
            raise CommandError("\n".join(f"{_name(file)}: {each}" for each in missing))
        changes = choose_changes(present, declared, owner=owner, adopt=adopt)
        if prune:
            batches = read_open_batches(api, present, owner=owner)
            deletions = choose_deletions(present, declared, owner=owner, open_batches=batches)
            if not dry_run and not yes:
                _ask(deletions, as_json=as_json)
            changes += deletions
        outcomes = [_planned(change) for change in changes] if dry_run else apply_changes(api, changes)
    if as_json:
        print_json({"dry_run": dry_run, "changes": [_json(each) for each in outcomes]})
    else:
        _print(outcomes, dry_run=dry_run)
    if any(each.state in {"failed", "not done"} for each in outcomes):
        raise typer.Exit(1)


@examples("tidepool export > fleet.yaml")
def export_file(context: typer.Context) -> None:
    """Print the YAML file that declares what is there."""
    with connected(context) as api:
        typer.echo(export_text(read_resources(api)), nl=False)


def _owner(owner: str | None) -> str | None:
    try:
        return FleetFile(owner=owner).owner
    except ValidationError as error:
        raise typer.BadParameter(f"--owner: {error.errors()[0]['msg']}") from None


def _ask(deletions: list[Change], *, as_json: bool) -> None:
    """Ask before anything is deleted.

    Raises:
        CommandError: there is nobody to ask, or the answer is no; nothing is changed.
    """
    titles = [each.resource.title for each in deletions if each.refused is None]
    if not titles:
        return
    if as_json or not sys.stdin.isatty():
        raise CommandError(f"--prune would delete {', '.join(titles)}: nothing is changed without --yes")
    if not typer.confirm(f"Delete {', '.join(titles)}?", err=True):
        raise CommandError("nothing is changed")


def _planned(change: Change) -> Applied:
    return Applied(change=change, state="failed" if change.refused else "planned", error=change.refused)


def _name(file: Path) -> str:
    return "standard input" if str(file) == "-" else str(file)


def _text(file: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{_name(file)} cannot be read: {error}") from None


def _print(outcomes: list[Applied], *, dry_run: bool) -> None:
    for each in outcomes:
        change = each.change
        state = "" if each.state in {"planned", "done"} else f": {each.state.upper()}"
        typer.echo(f"{_SIGNS[change.action]} {change.resource.title}{state}")
        for name, (before, after) in change.fields().items() if change.action == "change" else ():
            typer.echo(f"    {name}: {_value(before)} -> {_value(after)}")
        if each.error is not None:
            typer.echo(f"    {each.error}")
    typer.echo(_summary(outcomes, dry_run=dry_run))


def _summary(outcomes: list[Applied], *, dry_run: bool) -> str:
    if not outcomes:
        return "nothing to change"
    if dry_run:
        refused = sum(each.state == "failed" for each in outcomes)
        also = f", {refused} refused" if refused else ""
        return f"{len(outcomes) - refused} to change{also}; nothing was changed"
    count = {state: sum(each.state == state for each in outcomes) for state in ("done", "failed", "not done")}
    if count["done"] == len(outcomes):
        return f"{len(outcomes)} changed"
    return (
        f"{count['done']} changed, {count['failed']} failed, {count['not done']} not tried;"
        " run it again when the cause is mended: it goes on from here"
    )


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _json(outcome: Applied) -> dict[str, Any]:
    change: Change = outcome.change
    return {
        "action": change.action,
        "kind": change.resource.kind.name,
        "key": list(change.resource.key),
        "fields": {name: {"before": old, "after": new} for name, (old, new) in change.fields().items()},
        "state": outcome.state,
        "error": outcome.error,
    }
