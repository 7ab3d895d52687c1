"""Signing in at an OpenID provider: the browser goes there, comes back, and has a session or an explanation."""

import re
import secrets
from urllib.parse import quote

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import RedirectResponse

from controlplane.api.browsers import SESSION_COOKIE, cookie_of, drop_cookie, root_of, set_cookie
from controlplane.api.console.claims import identity_of_claims
from controlplane.api.console.provider import Departure, OpenIdProvider, ProviderError
from controlplane.api.console.sessions import begin, limit_attempts
from controlplane.api.errors import translate_database
from controlplane.api.state import State, state_of
from controlplane.errors import NotFoundError, TidepoolError
from controlplane.store.console import ConsoleFlow, Identity, keep_flow, take_flow

log = structlog.get_logger()
router = APIRouter(prefix="/ui/oidc", include_in_schema=False)
FLOW_COOKIE = "tidepool_sign_in"
FLOW_LASTS_S = 600
_PLACE = re.compile(r"/[A-Za-z0-9/_.~%?&=,:@+-]{0,500}")
_PROBLEM_CHARS_MAX = 500
_NOT_BEGUN = (
    "This sign-in was not begun in this browser, was finished already, or took more than ten minutes. Try again."
)


@router.get("/start")
async def start(request: Request, to: str = "/") -> Response:
    """Send the browser to the provider. `to`: the page of the console that it comes back to."""
    state = state_of(request)
    provider = _provider(state)
    secret = secrets.token_urlsafe(32)
    place = to if _PLACE.fullmatch(to) else "/"
    try:
        await limit_attempts(request)
        departure = await provider.depart(_redirect_uri(request))
        await run_in_threadpool(_keep, state, secret, departure, place)
    except (TidepoolError, SQLAlchemyError) as error:
        return _refused(request, error)
    response = _to(departure.url)
    set_cookie(response, request, FLOW_COOKIE, secret, lasts_s=FLOW_LASTS_S, strict=False)
    return response


@router.get("/callback")
async def callback(request: Request) -> Response:
    """The browser is back. What it began is taken from the database, so that nothing is finished twice."""
    state = state_of(request)
    provider = _provider(state)
    try:
        await limit_attempts(request)
        secret = cookie_of(request, FLOW_COOKIE)
        asked = request.query_params.get("state", "")
        flow = None if secret is None else await run_in_threadpool(_take, state, secret, asked)
        if flow is None:
            raise ProviderError(_NOT_BEGUN)
        arrival = await provider.arrive(
            request.query_params, nonce=flow.nonce, verifier=flow.verifier, redirect_uri=_redirect_uri(request)
        )
        identity = identity_of_claims(arrival.claims, arrival.id_token, state.settings)
        made = await run_in_threadpool(_begin, state, identity, request)
    except (TidepoolError, SQLAlchemyError) as error:
        return _refused(request, error)
    response = _to(f"{root_of(request.scope)}/ui/#{flow.place}")
    set_cookie(response, request, SESSION_COOKIE, made, lasts_s=state.settings.console_session_s)
    drop_cookie(response, request, FLOW_COOKIE)
    return response


def _provider(state: State) -> OpenIdProvider:
    if state.provider is None:
        raise NotFoundError("this gateway has no OpenID provider: set TIDEPOOL_OIDC_ISSUER")
    return state.provider


def _redirect_uri(request: Request) -> str:
    base = state_of(request).settings.console_url or str(request.base_url)
    return f"{base.rstrip('/')}/ui/oidc/callback"


def _keep(state: State, secret: str, departure: Departure, place: str) -> None:
    with state.database.transaction() as session:
        keep_flow(
            session,
            secret,
            state=departure.state,
            nonce=departure.nonce,
            verifier=departure.verifier,
            place=place,
            lasts_s=FLOW_LASTS_S,
        )


def _take(state: State, secret: str, asked: str) -> ConsoleFlow | None:
    with state.database.transaction() as session:
        return take_flow(session, secret, state=asked)


def _begin(state: State, identity: Identity, request: Request) -> str:
    with state.database.transaction() as session:
        return begin(session, identity, request, state.settings).secret


def _refused(request: Request, error: TidepoolError | SQLAlchemyError) -> Response:
    """Back to the sign-in page, which shows what went wrong."""
    told = error if isinstance(error, TidepoolError) else translate_database(error)
    log.warning("sign-in failed", error=told.message)
    problem = quote(told.message[:_PROBLEM_CHARS_MAX], safe="")
    response = _to(f"{root_of(request.scope)}/ui/#/sign-in?problem={problem}")
    drop_cookie(response, request, FLOW_COOKIE)
    return response


def _to(url: str) -> Response:
    return RedirectResponse(url, status_code=303, headers={"Cache-Control": "no-store"})
