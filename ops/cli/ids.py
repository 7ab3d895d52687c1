"""Ids on the command line: whole, by their first characters as in git, or `latest` and `current`."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ops.client.api import Api, CommandError

PlanId = Annotated[
    str, typer.Argument(metavar="PLAN", help="Its id, the first characters of it, `latest`, or `current`: in force.")
]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="Its id, the first characters of it, or `latest`: the newest of all.")
]
_MATCHES_SHOWN = 10
_HEX_CHARS = 32


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Where ids of a kind are listed, and in which order. `has_ended`: the list leaves ended ones out by default.
    `called`: what people call it, where that is not the beginning of its ids.
    """

    path: str
    newest_first: bool
    has_ended: bool = False
    called: str = ""


_KINDS = {
    "plan": _Kind(path="/admin/plans", newest_first=True),
    "batch": _Kind(path="/v1/batches", newest_first=True),
    "whatif": _Kind(path="/admin/what-if", newest_first=True, called="what-if run"),
    "key": _Kind(path="/admin/keys", newest_first=False),
    "pin": _Kind(path="/admin/pins", newest_first=False, has_ended=True),
    "rollout": _Kind(path="/admin/rollouts", newest_first=True, called="roll-out"),
    "inst": _Kind(path="/admin/instances", newest_first=False, has_ended=True),
}


def whole_id(api: Api, kind: str, given: str) -> str:
    """The id of `kind` (a key of _KINDS) that begins with `given`, with or without `kind_`. Plans, batches, roll-outs
    and what-if runs may be `latest`; `current` is the plan in force. A text that begins no id is returned
    unchanged, for the API to refuse.

    Raises:
        CommandError: several ids begin with it, which the message lists; or there is no latest or current one.
    """
    listed = _KINDS[kind]
    if given == "current" and kind == "plan":
        return _current_plan(api)
    if given == "latest" and listed.newest_first:
        rows = api.get(listed.path, limit=1)["data"]
        if not rows:
            raise CommandError(f"there is no {listed.called or kind} yet")
        return str(rows[0]["id"])
    prefix = given if given.startswith(f"{kind}_") else f"{kind}_{given}"
    if re.fullmatch(rf"{kind}_[0-9a-f]{{1,{_HEX_CHARS}}}", prefix) is None:
        return given
    if len(prefix) == len(f"{kind}_") + _HEX_CHARS:
        return prefix
    matches = _beginning_with(api, listed, prefix)
    if len(matches) > 1:
        more = ["..."] if len(matches) > _MATCHES_SHOWN else []
        raise CommandError(
            "\n  ".join(
                [f"'{given}' is not one {listed.called or kind}: these begin with it", *matches[:_MATCHES_SHOWN], *more]
            )
        )
    return matches[0] if matches else given


def _beginning_with(api: Api, listed: _Kind, prefix: str) -> list[str]:
    """Ids with the prefix, in the order of the list; at most one more than is shown."""
    query: dict[str, Any] = {"live_only": False} if listed.has_ended else {}
    after = f"{prefix}~" if listed.newest_first else prefix
    rows = api.get(listed.path, limit=_MATCHES_SHOWN + 1, after=after, **query)["data"]
    return [row["id"] for row in rows if row["id"].startswith(prefix)]


def _current_plan(api: Api) -> str:
    plan = api.get("/admin/status")["plan"]
    if plan is None:
        raise CommandError("no plan is in force")
    return str(plan["id"])
