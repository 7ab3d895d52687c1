"""LoRA adapters as models: what they say themselves, and what they take over from their base."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.checkpoints.adapters import read_adapter
from dataplane.protocol.errors import ModelLoadError
from ops.client.api import Api, CommandError, path_to
from ops.client.screen import Columns, print_answer, same

_FROM_BASE = ("architecture", "kv_bytes_per_token", "context_tokens", "task", "tool_parser", "reasoning_parser")

WithBase = Annotated[
    bool,
    typer.Option(
        "--with-base",
        help="Every instance of the base serves the adapter too, and the base's demand includes its own: it gets no"
        " profiles, regions and instances. vLLM loads it without a restart where it has reserved memory.",
    ),
]
ON_BASE: Columns = {**same("node", "slot", "state"), "why": lambda row: row["error"] or row["waits_for"] or ""}
"""The table of an adapter's places on instances of its base."""


def require_no_place(
    base: str | None, *, with_base: bool, regions: Sequence[str] | None, like: str | None, rates: Sequence[str] | None
) -> None:
    """Refuse what says where a model is placed, for an adapter that is wherever its base is.

    Raises:
        typer.BadParameter: so it is, or it is no adapter.
    """
    if not with_base:
        return
    if base is None:
        raise typer.BadParameter("--with-base is for an adapter: give --base and --adapter")
    given = (("--region", regions), ("--like", like), ("--tokens-per-s", rates))
    for option, value in given:
        if value:
            raise typer.BadParameter(f"{option} says where a model is placed; with --with-base that is where {base} is")


def put_with_base(api: Api, name: str, body: dict[str, Any], *, as_json: bool) -> None:
    """Register an adapter that the instances of its base serve."""
    made = {"model": api.put(path_to("/admin/models", name), body)}
    print_answer(made, f"model {name} is registered: every instance of {body['base']} serves it", as_json=as_json)


def base_text(model: dict[str, Any]) -> str:
    """The base of an adapter, and whether its instances serve the adapter."""
    return f"{model['base']}, whose instances serve it" if model.get("with_base") else str(model["base"])


def require_source(path: str | None, base: str | None, adapter: Path | None) -> None:
    """Refuse what is neither a checkpoint nor an adapter with its base.

    Raises:
        typer.BadParameter: so it is.
    """
    if (base is None) != (adapter is None):
        raise typer.BadParameter("--base and --adapter go together")
    if (path is None) == (adapter is None):
        raise typer.BadParameter("give either --path, or --base and --adapter")


def describe_adapter(folder: Path) -> dict[str, Any]:
    """The part of the body of `PUT /admin/models/{name}` that an adapter's folder says.

    Raises:
        CommandError: it has no adapter, or one that is not supported.
    """
    folder = folder.expanduser().resolve()
    try:
        adapter = read_adapter(folder)
    except ModelLoadError as error:
        raise CommandError(error.message) from error
    return {"path": str(folder), "weights_bytes": adapter.stored_bytes, "parameters": adapter.parameters}


def taken_over(base: dict[str, Any], parsers: dict[str, str | None], *, with_base: bool) -> dict[str, Any]:
    """The part that is as for the base, a model of the admin API, but for `parsers` that are named. `with_base`: the
    base's instances serve it; control planes of the version before know no such field.
    """
    named = {field: value for field, value in parsers.items() if value is not None}
    served = {"with_base": True} if with_base else {}
    return {field: base[field] for field in _FROM_BASE} | named | {"base": base["name"]} | served


def sizes_of(api: Api, name: str) -> dict[str, Any]:
    """The sizes by which steps of a model are timed: of an adapter, those of its base."""
    model: dict[str, Any] = api.get(path_to("/admin/models", name))
    return model if model["base"] is None else api.get(path_to("/admin/models", model["base"]))
