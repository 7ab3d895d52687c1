"""Sessions of people: signing in with a key, what the session is, and logging out, here or everywhere."""

import ipaddress
import time
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, BackgroundTasks, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from controlplane.api.admin.problems import PROBLEMS, described
from controlplane.api.auth import notify_gateways, signed_in
from controlplane.api.browsers import (
    CSRF_HEADER,
    SESSION_COOKIE,
    cookie_of,
    csrf_token,
    drop_cookie,
    require_own_page,
    session_secret,
    set_cookie,
)
from controlplane.api.console.provider import ProviderError
from controlplane.api.credentials import Caller, SignedIn, caller_of_session
from controlplane.api.state import SessionDep, State, StateDep, state_of
from controlplane.declarations import Body
from controlplane.errors import (
    AuthenticationError,
    InvalidValueError,
    PermissionDeniedError,
    RateLimitError,
    SignInNeededError,
)
from controlplane.settings import Settings
from controlplane.store.console import (
    EndsBy,
    Identity,
    NewSession,
    SessionSource,
    begin_session,
    end_session,
    end_sessions_of,
    find_session,
    id_token_of,
    identity_of,
    note_seen,
    use_link,
)
from controlplane.store.keys import find_key, record, replaced_secret_ends_at
from controlplane.store.tables import Role

log = structlog.get_logger()
PEOPLE = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)
"""Roles that keys of people have."""
_Secret = Annotated[str, Field(min_length=1, max_length=512)]


class SignIn(Body):
    """How a person signs in: one of the two."""

    key: _Secret | None = Field(None, description="an API key of the role viewer, operator or admin")
    link: _Secret | None = Field(None, description="the secret of a sign-in link, which is good once")


class SessionInfo(BaseModel):
    """A person's session. Times are Unix times by the server's clock, which is at `now_s`."""

    name: str = Field(examples=["admin"])
    role: Literal["viewer", "operator", "admin"]
    tenant: str = Field(examples=["default"])
    source: Literal["key", "link", "oidc"] = Field(description="how the person signed in")
    csrf_token: str = Field(description=f"goes into the header {CSRF_HEADER} of every request that changes something")
    signed_in_s: float
    idle_ends_s: float = Field(description="when the session ends unless the person does something before")
    ends_s: float = Field(description="when the session ends at the latest")
    now_s: float


class Ended(BaseModel):
    """Sessions that have ended."""

    ended: int = Field(description="how many")
    provider_logout_url: str | None = Field(
        None, description="where the browser goes to log out of the OpenID provider too, which then sends it back"
    )


def sign_in_needed(settings: Settings, message: str) -> SignInNeededError:
    """No session, and how a person may begin one."""
    if settings.oidc_issuer is None:
        return SignInNeededError(message, ways=("key",), oidc_name=None)
    return SignInNeededError(message, ways=("key", "oidc"), oidc_name=settings.oidc_name)


_PROBLEMS = {status: PROBLEMS[status] for status in (403, "default")} | {
    401: described(
        SignInNeededError("You are not signed in.", ways=("key",), oidc_name=None), "No session, or a wrong key."
    ),
    429: described(RateLimitError("Too many attempts to sign in."), "Too many attempts to sign in."),
}
router = APIRouter(
    prefix="/ui",
    tags=["console"],
    responses=_PROBLEMS,
    generate_unique_id_function=lambda route: f"console_{route.name}",
)


async def _person(request: Request) -> Caller:
    """The person whose session's cookie a request has; none else."""
    secret = session_secret(request)
    settings = state_of(request).settings
    if secret is None:
        raise sign_in_needed(settings, "You are not signed in.")
    try:
        return await signed_in(request, secret)
    except AuthenticationError as error:
        raise sign_in_needed(settings, error.message) from None


Person = Annotated[Caller, Depends(_person)]


async def _provider_logout_url(request: Request, caller: Person) -> str | None:
    """Where a person who came from the OpenID provider logs out of it; None where it cannot be asked."""
    state, session_id = state_of(request), _session_of(caller).id

    def read() -> str | None:
        with state.database.transaction() as session:
            return id_token_of(session, session_id)

    if state.provider is None or _session_of(caller).issuer is None:
        return None
    token = await run_in_threadpool(read)
    base = state.settings.console_url or str(request.base_url)
    try:
        return None if token is None else await state.provider.logout_url(token, f"{base.rstrip('/')}/ui/")
    except ProviderError as error:
        log.warning("the OpenID provider was not told of a log-out", error=error.message)
        return None


LogoutUrl = Annotated[str | None, Depends(_provider_logout_url)]


async def check_attempt(request: Request) -> None:
    """Refuse to sign in whom another site's page sends, and who tries too often."""
    state = state_of(request)
    require_own_page(request, state.settings, secret=None)
    await limit_attempts(request)


async def limit_attempts(request: Request) -> None:
    """Refuse to sign in who tries too often."""
    state = state_of(request)
    await state.limits.attempt(f"sign-in from {_address(request)}", state.settings.console_sign_ins_per_minute)
    await state.limits.attempt("sign-in from anywhere", state.settings.console_sign_ins_all_per_minute)


@router.post("/session", summary="Sign in", dependencies=[Depends(check_attempt)])
def sign_in(
    body: SignIn,
    request: Request,
    response: Response,
    session: SessionDep,
    state: StateDep,
    after_commit: BackgroundTasks,
) -> SessionInfo:
    """The answer sets the session's cookie. A session that the browser had before ends."""
    identity, ends_by = _identity(session, body)
    before = _end_present(request, session)
    after_commit.add_task(notify_gateways, state, before)
    made = begin(session, identity, request, state.settings, ends_by=ends_by)
    set_cookie(response, request, SESSION_COOKIE, made.secret, lasts_s=state.settings.console_session_s)
    return _read_again(response, session, state, made.secret)


@router.get("/session", summary="The session")
def get_session(request: Request, response: Response, caller: Person) -> SessionInfo:
    """Whose session the browser's cookie is of; the problem of a 401 says how to sign in."""
    return _info(response, caller, cookie_of(request, SESSION_COOKIE))


@router.post("/session/seen", summary="Keep the session")
def keep_session(
    request: Request, response: Response, session: SessionDep, state: StateDep, caller: Person
) -> SessionInfo:
    """The person did something: the idle limit counts anew. No other request moves it."""
    note_seen(session, _session_of(caller).id)
    secret = cookie_of(request, SESSION_COOKIE) or ""
    return _read_again(response, session, state, secret)


@router.delete("/session", summary="Log out")
def log_out(
    request: Request,
    response: Response,
    session: SessionDep,
    state: StateDep,
    caller: Person,
    after_commit: BackgroundTasks,
    logout_url: LogoutUrl,
) -> Ended:
    """The session ends, everywhere within seconds."""
    hashes = _end_present(request, session)
    record(session, actor=caller.name, action="session.end", subject=_session_of(caller).id)
    after_commit.add_task(notify_gateways, state, hashes)
    drop_cookie(response, request, SESSION_COOKIE)
    return Ended(ended=len(hashes), provider_logout_url=logout_url)


@router.delete("/sessions", summary="Log out everywhere")
def log_out_everywhere(
    request: Request,
    response: Response,
    session: SessionDep,
    state: StateDep,
    caller: Person,
    after_commit: BackgroundTasks,
    logout_url: LogoutUrl,
) -> Ended:
    """All sessions of the person end, in whatever browser they are, and unused links to more."""
    person = _session_of(caller)
    hashes = end_sessions_of(session, subject=person.subject, issuer=person.issuer)
    record(session, actor=caller.name, action="session.end_all", subject=person.id, after={"ended": len(hashes)})
    after_commit.add_task(notify_gateways, state, hashes)
    drop_cookie(response, request, SESSION_COOKIE)
    return Ended(ended=len(hashes), provider_logout_url=logout_url)


def begin(
    session: Session, identity: Identity, request: Request, settings: Settings, *, ends_by: EndsBy = None
) -> NewSession:
    """Begin a session, with a line in the audit. `ends_by`: as in `begin_session`."""
    made = begin_session(session, identity, settings, ends_by=ends_by)
    told = {"source": identity.source, "role": identity.role, "tenant": identity.tenant, "subject": identity.subject}
    record(
        session,
        actor=made.row.audit_name,
        action="session.begin",
        subject=made.row.id,
        after=told | {"issuer": identity.issuer, "address": _address(request)},
    )
    return made


def _identity(session: Session, body: SignIn) -> tuple[Identity, EndsBy]:
    """Who signs in, and when the session ends at the latest: with the secret that it comes from, if that was replaced.

    Raises:
        InvalidValueError: it is not said by one of the two.
        AuthenticationError: the key or the link is not good.
        PermissionDeniedError: the key is none of a person's.
    """
    if (body.key is None) == (body.link is None):
        raise InvalidValueError("key: give either a key or a link", param="key")
    if body.link is not None:
        used = use_link(session, body.link)
        if used is None:
            raise AuthenticationError(
                "The link was used, or is older than ten minutes. `tidepool console` prints another.", param="link"
            )
        return identity_of(used.key, SessionSource.LINK), used.session_ends_at
    key = find_key(session, body.key or "", lock=True)
    if key is None:
        raise AuthenticationError("Incorrect API key provided.", param="key")
    if Role(key.role) not in PEOPLE:
        raise PermissionDeniedError(
            f"key: keys of the role '{key.role}' are for programs; people sign in with one of: {', '.join(PEOPLE)}",
            param="key",
        )
    return identity_of(key, SessionSource.KEY), replaced_secret_ends_at(body.key)


def _end_present(request: Request, session: Session) -> frozenset[str]:
    """End the session that the browser has; returns the hashes of ended secrets."""
    secret = cookie_of(request, SESSION_COOKIE)
    return frozenset() if secret is None else end_session(session, secret)


def _read_again(response: Response, session: Session, state: State, secret: str) -> SessionInfo:
    """The session as it is now."""
    found = find_session(session, secret, state.settings)
    if found is None:
        raise sign_in_needed(state.settings, "The session has ended. Sign in again.")
    state.sessions.renew(found.row.secret_hash)
    return _info(response, caller_of_session(found, state.settings), secret)


def _session_of(caller: Caller) -> SignedIn:
    assert caller.session is not None, "checked by `_person`"
    return caller.session


def _info(response: Response, caller: Caller, secret: str | None) -> SessionInfo:
    response.headers["Cache-Control"] = "no-store"
    person = _session_of(caller)
    return SessionInfo(
        name=person.name,
        role=caller.role.value,
        tenant=caller.tenant,
        source=person.source,
        csrf_token=csrf_token(secret or ""),
        signed_in_s=person.began_s,
        idle_ends_s=min(person.idle_ends_s, person.ends_s),
        ends_s=person.ends_s,
        now_s=time.time(),
    )


def _address(request: Request) -> str:
    """The address that attempts are counted by; of IPv6 the network that one customer has."""
    host = request.client.host if request.client is not None else "unknown"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)
