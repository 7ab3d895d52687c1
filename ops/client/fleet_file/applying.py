"""Changes made through the admin API, one after the other; what is refused does not keep the others from being made."""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from ops.client.api import Api, CommandError, UnreachableError, path_to
from ops.client.drains import drain_endpoint
from ops.client.fleet_file.changes import Change
from ops.client.fleet_file.resources import ENDPOINT, PIN, Resource


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What became of a change. `error`: why it failed; None otherwise."""

    change: Change
    state: Literal["planned", "done", "failed", "not done"]
    error: str | None = None


def apply_changes(api: Api, changes: Iterable[Change]) -> list[Applied]:
    """Make changes in their order. A refused one fails by itself, and those that need it fail after it; where the API
    cannot be reached, or takes the key no more, the rest is not tried.
    """
    outcomes: list[Applied] = []
    over = False
    for change in changes:
        if over:
            outcomes.append(Applied(change=change, state="not done"))
            continue
        if change.refused is not None:
            outcomes.append(Applied(change=change, state="failed", error=change.refused))
            continue
        try:
            _make(api, change)
        except CommandError as error:
            outcomes.append(Applied(change=change, state="failed", error=str(error)))
            over = isinstance(error, UnreachableError) or error.status == HTTPStatus.UNAUTHORIZED
        else:
            outcomes.append(Applied(change=change, state="done"))
    return outcomes


def _make(api: Api, change: Change) -> None:
    if change.before is not None and (change.after is None or change.resource.kind is PIN):
        _delete(api, change.before)  # a pin is never changed: another takes its place
    if change.after is not None:
        _put(api, change.after)


def _delete(api: Api, resource: Resource) -> None:
    kind = resource.kind
    if kind is PIN:
        api.delete(path_to(kind.path, str(resource.id)))
        return
    if kind.keys == ("name",):
        api.delete(path_to(kind.path, resource.key[0]))
        return
    if kind is ENDPOINT:
        drain_endpoint(api, *resource.key)
    api.send("DELETE", kind.path, params=dict(zip(kind.keys, resource.key, strict=True)))


def _put(api: Api, resource: Resource) -> None:
    kind = resource.kind
    owner = {} if resource.owner is None else {"owner": resource.owner}
    if kind.keys == ("name",):
        api.send("PUT", path_to(kind.path, resource.key[0]), json=resource.fields, params=owner)
        return
    body = dict(zip(kind.keys, resource.key, strict=True)) | resource.fields
    api.send("POST" if kind is PIN else "PUT", kind.path, json=body, params=owner)
