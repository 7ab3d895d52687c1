"""LoRA adapters as models: what they say themselves, and what they take over from their base."""

from pathlib import Path
from typing import Any

import typer

from dataplane.checkpoints.adapters import read_adapter
from dataplane.protocol.errors import ModelLoadError
from ops.client.api import Api, CommandError

_FROM_BASE = ("architecture", "kv_bytes_per_token", "context_tokens", "task", "tool_parser", "reasoning_parser")


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


def taken_over(base: dict[str, Any], parsers: dict[str, str | None]) -> dict[str, Any]:
    """The part that is as for the base, a model of the admin API, but for `parsers` that are named."""
    named = {field: value for field, value in parsers.items() if value is not None}
    return {field: base[field] for field in _FROM_BASE} | named | {"base": base["name"]}


def sizes_of(api: Api, name: str) -> dict[str, Any]:
    """The sizes by which steps of a model are timed: of an adapter, those of its base."""
    model: dict[str, Any] = api.get(f"/admin/models/{name}")
    return model if model["base"] is None else api.get(f"/admin/models/{model['base']}")
