"""Links by which a person signs in without a key at hand: each is good once."""

from datetime import datetime

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.admin.problems import PROBLEMS
from controlplane.api.auth import Admin
from controlplane.api.state import SessionDep, StateDep
from controlplane.errors import PermissionDeniedError
from controlplane.store.console import make_link
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
    made = make_link(session, caller.key_id)
    after = {"ends_at": made.ends_at.isoformat()}
    record(session, actor=caller.name, action="link.create", subject=caller.key_id, after=after)
    base = state.settings.console_url or str(request.base_url)
    return SignInLink(page=f"{base.rstrip('/')}/ui/#/sign-in?link=", secret=made.secret, ends_at=made.ends_at)
