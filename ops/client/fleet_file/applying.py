"""Changes made through the admin API, one after the other; what is refused does not keep the others from being made."""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal
from urllib.parse import quote

from ops.client.api import Api, CommandError
from ops.client.fleet_file.changes import Change
from ops.client.fleet_file.resources import PIN, Resource

_NO_USE_GOING_ON = frozenset({None, HTTPStatus.UNAUTHORIZED})


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
        try:
            _make(api, change)
        except CommandError as error:
            outcomes.append(Applied(change=change, state="failed", error=str(error)))
            over = error.status in _NO_USE_GOING_ON
        else:
            outcomes.append(Applied(change=change, state="done"))
    return outcomes


def _make(api: Api, change: Change) -> None:
    if change.resource.kind is PIN and change.before is not None:
        api.delete(f"{PIN.path}/{change.before.id}")  # a pin is never changed: another takes its place
    if change.after is not None:
        _put(api, change.after)


def _put(api: Api, resource: Resource) -> None:
    kind = resource.kind
    if kind.keys == ("name",):
        api.put(f"{kind.path}/{quote(resource.key[0])}", resource.fields)
        return
    body = dict(zip(kind.keys, resource.key, strict=True)) | resource.fields
    if kind is PIN:
        api.post(kind.path, body)
    else:
        api.put(kind.path, body)
