"""The term of the primary, and the word of an operator that this primary shall be obeyed."""

from fastapi import APIRouter
from pydantic import Field

from controlplane.api.admin.fields import Answer
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Admin, Viewer
from controlplane.api.state import SessionDep
from controlplane.store import terms
from controlplane.store.keys import record

router = APIRouter(prefix="/term", tags=["admin: fleet"], route_class=IdempotentRoute)


class Term(Answer):
    """The term of the primary that answers."""

    term: int = Field(description="each promotion and each restored backup raises it")
    reported: int = Field(
        description="the newest that nodes reported when it was newer: they obey nobody of an older one", examples=[0]
    )
    system_identifier: str = Field(description="of the PostgreSQL cluster", examples=["7576041316263739393"])
    timeline: int = Field(description="of the primary when the term began")


@router.get("", summary="The term of the primary")
def get_term(session: SessionDep, _: Viewer) -> Term:
    """Found anew: a promotion that nobody has seen yet begins its term here."""
    terms.current_term(session)
    return _shown(session)


@router.post("/raise", summary="Let nodes obey this primary")
def raise_term(session: SessionDep, caller: Admin) -> Term:
    """Begins a term that is newer than any that nodes reported, where an operator went back to an older database on
    purpose. Never at a primary that was replaced: its region would follow it again.
    """
    before = terms.current_term(session)
    raised = terms.raise_term(session, why=f"raised by {caller.name}")
    terms_of = {"before": {"term": before}, "after": {"term": raised}}
    record(session, actor=caller.name, action="term.raise", subject=str(raised), **terms_of)
    return _shown(session)


def _shown(session: SessionDep) -> Term:
    row = terms.read_term(session)
    assert row is not None, "it was just asked for"
    session.refresh(row)
    return Term(
        term=row.term,
        reported=row.reported,
        system_identifier=str(row.system_identifier % 2**64),
        timeline=row.timeline,
    )
