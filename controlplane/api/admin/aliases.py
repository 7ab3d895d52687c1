"""Aliases: names that clients ask for, and the models that answer, by weight."""

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import After, AliasPath, Limit, OwnedAnswer, Owner, PageOf
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep
from controlplane.declarations import AliasChange
from controlplane.store import aliases
from controlplane.store.alias_tables import Alias as AliasRow
from controlplane.store.fleet import fleet_version
from controlplane.store.keys import record, snapshot
from controlplane.store.rows import require
from controlplane.store.tables import Json

router = APIRouter(prefix="/aliases", tags=["admin: models"], route_class=IdempotentRoute)


class Alias(OwnedAnswer):
    """A name and its models."""

    name: str = Field(examples=["chat"])
    targets: dict[str, int] = Field(description="weights by model", examples=[{"qwen3-8b": 95, "qwen3-8b-r2": 5}])
    rollout: str | None = Field(description="the roll-out that moves the weights now")


@router.put("/{name:path}", summary="Make an alias, or change its models")
def put_alias(
    name: AliasPath, change: AliasChange, session: SessionDep, caller: Operator, owner: Owner = None
) -> Alias:
    """Gateways follow within seconds. An alias may have the name of one of its models: requests for that name then go
    by the weights. Refused (409) while a roll-out moves them.
    """
    fleet_version(session, lock=True)  # the store asks for it too, but what was before is read first
    before = _document(session, session.get(AliasRow, name))
    row = aliases.put_alias(session, name, change.targets)
    if owner is not None:
        row.owner = owner
        session.flush()
    after = _document(session, row)
    if before != after:
        record(session, actor=caller.name, action="alias.put", subject=name, before=before, after=after)
    return _shown(session, row)


@router.get("", summary="List aliases")
def list_aliases(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[Alias]:
    """Aliases by name."""
    page = aliases.list_aliases(session, after=after, limit=limit)
    return PageOf(data=[_shown(session, row) for row in page.rows], has_more=page.has_more, next=page.next)


@router.get("/{name:path}", summary="One alias")
def get_alias(name: AliasPath, session: SessionDep, _: Viewer) -> Alias:
    """An alias."""
    return _shown(session, require(session, AliasRow, name, param="alias"))


@router.delete("/{name:path}", summary="Delete an alias")
def delete_alias(name: AliasPath, session: SessionDep, caller: Operator) -> Alias:
    """Its models stay; one of its name is asked for by that name again. Refused (409) during a roll-out."""
    fleet_version(session, lock=True)  # as above
    shown = _shown(session, require(session, AliasRow, name, param="alias"))
    before = _document(session, session.get(AliasRow, name))
    aliases.delete_alias(session, name)
    record(session, actor=caller.name, action="alias.delete", subject=name, before=before)
    return shown


def _shown(session: Session, row: AliasRow) -> Alias:
    return Alias(
        name=row.name,
        owner=row.owner,
        targets=aliases.weights_of(session, row.name),
        rollout=aliases.live_rollout_of(session, row.name),
    )


def _document(session: Session, row: AliasRow | None) -> Json | None:
    """An alias with its models, as the audit keeps it."""
    return None if row is None else snapshot(row) | {"targets": aliases.weights_of(session, row.name)}
