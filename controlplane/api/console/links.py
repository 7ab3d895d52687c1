"""What an admin does about sign-ins of people: a link, good once, for who has no key at hand, and the end of another's
sessions.
"""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Request
from pydantic import BaseModel, Field

from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.admin.problems import PROBLEMS
from controlplane.api.auth import Admin, notify_gateways, secret_of
from controlplane.api.console.sessions import Ended
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import TEXT
from controlplane.errors import PermissionDeniedError
from controlplane.store.console import end_sessions_of, make_link
from controlplane.store.keys import record

router = APIRouter(
    prefix="/admin/console",
    tags=["console"],
    responses=PROBLEMS,
    route_class=IdempotentRoute,
    generate_unique_id_function=lambda route: f"admin_{route.name}",
)


class SignInLink(BaseModel):
    """A link: the page's address, followed by the secret. Browsers send no server what follows the `#`."""

    page: str = Field(examples=["https://tide.example/ui/#/sign-in?link="])
    secret: str | None = Field(
        description="good once; null in the answer to a request repeated by its Idempotency-Key",
        examples=["y0pI2H2x1QmV3m4h1m3Qd1v3xk0o9m6QJbXh5c3Yx8w"],
    )
    ends_at: datetime = Field(description="until when it is good")


@router.post("/links", summary="Make a sign-in link", status_code=201)
def create_link(request: Request, session: SessionDep, state: StateDep, caller: Admin) -> SignInLink:
    """Who opens it within ten minutes signs in to the console with the rights of the key that made it. Sessions make no
    links.
    """
    if caller.session is not None:
        raise PermissionDeniedError("sign-in links are made with an admin key, not with a session")
    made = make_link(session, caller.key_id, key_secret=secret_of(request))
    after = {"ends_at": made.ends_at.isoformat()}
    record(session, actor=caller.name, action="link.create", subject=caller.key_id, after=after)
    base = state.settings.console_url or str(request.base_url)
    return SignInLink(page=f"{base.rstrip('/')}/ui/#/sign-in?link=", secret=made.secret, ends_at=made.ends_at)


Subject = Annotated[
    str,
    Query(
        max_length=1000,
        pattern=TEXT,
        description="whose: what the audit's `session.begin` calls the subject; of a session that began with a key, the"
        " key's id",
        examples=["key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"],
    ),
]
Issuer = Annotated[
    str | None,
    Query(max_length=2000, pattern=TEXT, description="the OpenID provider; left out: the sessions began with a key"),
]


@router.delete("/sessions", summary="End the sessions of a person")
def end_sessions(
    session: SessionDep,
    state: StateDep,
    caller: Admin,
    after_commit: BackgroundTasks,
    subject: Subject,
    issuer: Issuer = None,
) -> Ended:
    """All sessions of the person end within seconds, everywhere, and unused links to more. The key stays good, and who
    signs in by the provider may do so again.
    """
    hashes = end_sessions_of(session, subject=subject, issuer=issuer)
    after = {"issuer": issuer, "ended": len(hashes)}
    record(session, actor=caller.name, action="session.end_all", subject=subject, after=after)
    after_commit.add_task(notify_gateways, state, hashes)
    return Ended(ended=len(hashes))
