"""`alias`: names that clients ask for, and the models that answer."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.listing import print_pages
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, print_answer, print_fields, print_json, same

_WEIGHT = 1
aliases = typer.Typer(
    no_args_is_help=True, help="Aliases: names that clients ask for, and the models that answer, by weight."
)


@aliases.command("put")
@examples(
    "tidepool alias put chat qwen3-8b",
    "tidepool alias put chat qwen3-8b=95 qwen3-8b-r2=5      every twentieth conversation gets the new one",
)
def put_alias(
    context: typer.Context,
    name: str,
    targets: Annotated[
        list[str],
        typer.Argument(metavar="MODEL[=WEIGHT]...", help="Each gets its weight's share of the sum; default: 1."),
    ],
    as_json: AsJson = False,
) -> None:
    """Make an alias, or give it other models or weights. Gateways follow within seconds."""
    body = {"targets": dict(_target(text) for text in targets)}
    with connected(context) as api:
        answer = api.put(path_to("/admin/aliases", name), body)
    print_answer(answer, f"{name} is {targets_text(answer)}", as_json=as_json)


@aliases.command("list")
@examples("tidepool alias list")
def list_aliases(context: typer.Context, as_json: AsJson = False) -> None:
    """List aliases and their models."""
    columns: Columns = {"alias": "name", "models": targets_text, **same("rollout", "owner")}
    print_pages(context, "/admin/aliases", "Aliases", columns, as_json=as_json)


@aliases.command("show")
@examples("tidepool alias show chat")
def show_alias(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show an alias."""
    with connected(context) as api:
        answer = api.get(path_to("/admin/aliases", name))
    if as_json:
        print_json(answer)
        return
    print_fields([("alias", name), ("models", targets_text(answer)), ("roll-out", answer["rollout"] or "none")])


@aliases.command("delete")
@examples("tidepool alias delete chat")
def delete_alias(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Delete an alias. Its models stay."""
    with connected(context) as api:
        answer = api.delete(path_to("/admin/aliases", name))
    print_answer(answer, f"alias {name} is deleted", as_json=as_json)


def targets_text(alias: Mapping[str, Any]) -> str:
    """An alias's models with their shares."""
    targets: dict[str, int] = alias["targets"]
    whole = sum(targets.values())
    return ", ".join(f"{model} {weight / whole:.0%}" for model, weight in targets.items())


def _target(text: str) -> tuple[str, int]:
    model, equals, weight = text.partition("=")
    if not equals:
        return model, _WEIGHT
    if not weight.isascii() or not weight.isdigit():
        raise typer.BadParameter(f"'{text}': the weight must be a whole number, 0 or more")
    return model, int(weight)
