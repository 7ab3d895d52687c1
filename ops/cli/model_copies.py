"""What a model takes over from another one: where it runs, and how fast."""

from collections.abc import Collection
from typing import Any

from ops.client.api import Api, CommandError, path_to


def profiles_of(api: Api, model: str, *, but: Collection[str]) -> list[dict[str, Any]]:
    """A model's profiles on GPU types other than these.

    Raises:
        CommandError: it is not registered.
    """
    api.get(path_to("/admin/models", model))
    return [row for row in api.pages("/admin/profiles", model=model)["data"] if row["gpu_type"] not in but]


def copy_profiles(api: Api, profiles: Collection[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Give another model these profiles."""
    return [api.put("/admin/profiles", _without_owner(row) | {"model": name}) for row in profiles]


def copy_endpoints(api: Api, model: str, name: str, *, but: Collection[str]) -> list[dict[str, Any]]:
    """Offer a model wherever another one is, except in these regions, with its maximum and without a minimum.

    Raises:
        CommandError: an endpoint was refused.
    """
    rows = [row for row in api.pages("/admin/endpoints", model=model)["data"] if row["region"] not in but]
    try:
        return [
            api.put(
                "/admin/endpoints",
                {"model": name, "region": row["region"], "instances_min": 0, "instances_max": row["instances_max"]},
            )
            for row in rows
        ]
    except CommandError as error:
        raise CommandError(
            f"model {name} is registered, but not offered wherever {model} is: {error}", status=error.status
        ) from error


def _without_owner(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "owner"}
