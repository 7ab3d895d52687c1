"""Who may do what. A key comes as `Authorization: Bearer`, or as Anthropic's clients send it, as `x-api-key`; a
person's browser sends the cookie of a session, which is as good as a key of its role. The role decides.
"""

import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from controlplane.api.browsers import require_own_page, session_secret
from controlplane.api.credentials import Caller
from controlplane.api.state import State, state_of
from controlplane.errors import AuthenticationError, PermissionDeniedError, UnavailableError, UnknownModelError
from controlplane.store.keys import KeyScope
from controlplane.store.tables import Role

NO_KEY = "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
_bearer = HTTPBearer(auto_error=False, description="A key made with `tidepool key create`.")

MAY: dict[Role, frozenset[Role]] = {
    Role.CLIENT: frozenset({Role.CLIENT, Role.OPERATOR, Role.ADMIN}),
    Role.VIEWER: frozenset({Role.VIEWER, Role.OPERATOR, Role.ADMIN}),
    Role.OPERATOR: frozenset({Role.OPERATOR, Role.ADMIN}),
    Role.ADMIN: frozenset({Role.ADMIN}),
    Role.NODE: frozenset({Role.NODE}),
}


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def bearer_of(request: Request) -> str | None:
    """The key in the header `Authorization`, if it is there."""
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() or None if kind.lower() == "bearer" else None


def secret_of(request: Request) -> str | None:
    """The secret of the key that a request gives, in either header."""
    return bearer_of(request) or request.headers.get("x-api-key")


async def authenticate(request: Request, credentials: Credentials) -> Caller:
    """The caller of a request.

    Raises:
        AuthenticationError: the request has no key and no session, or an invalid one.
        PermissionDeniedError: it has a session's cookie, but no page of ours sent it.
    """
    return await identify(request, None if credentials is None else credentials.credentials)


async def identify(request: Request, bearer: str | None) -> Caller:
    """The caller of a request, by its key or its session.

    Raises:
        AuthenticationError: the request has neither, or an invalid one.
        PermissionDeniedError: it has a session's cookie, but no page of ours sent it.
    """
    secret = request.headers.get("x-api-key") if bearer is None else bearer
    if secret:
        caller = await state_of(request).keys.find(secret)
    elif cookie := session_secret(request):
        return await signed_in(request, cookie)
    else:
        raise AuthenticationError(NO_KEY)
    request.state.caller = caller
    return caller


async def signed_in(request: Request, secret: str) -> Caller:
    """The person whose session has this secret.

    Raises:
        AuthenticationError: the session has ended.
        PermissionDeniedError: no page of ours sent the request.
    """
    state = state_of(request)
    caller = await state.sessions.find(secret)
    require_own_page(request, state.settings, secret=secret)
    request.state.caller = caller
    return caller


async def require(request: Request, bearer: str | None, role: Role, scope: KeyScope | None = None) -> Caller:
    """The caller of a request, whose key or session has the rights of `role` and, for a part of `/v1`, that `scope`.

    Raises:
        AuthenticationError: the request has no key and no session, or an invalid one.
        PermissionDeniedError: the key or the session is not for this.
    """
    caller = await identify(request, bearer)
    if caller.role not in MAY[role]:
        whose = "the key's role" if caller.session is None else "your role"
        raise PermissionDeniedError(f"this needs the role '{role.value}'; {whose} is '{caller.role.value}'")
    if scope is not None and caller.scopes is not None and scope not in caller.scopes:
        names = ", ".join(sorted(caller.scopes))
        raise PermissionDeniedError(f"this needs the scope '{scope.value}'; the key's scopes are: {names}")
    return caller


def needs(role: Role, scope: KeyScope | None = None) -> Callable[[Request, Credentials], Awaitable[Caller]]:
    """A dependency that requires what `require` does. It is one dependency, since nested ones cost time in every
    request.
    """

    async def check(request: Request, credentials: Credentials) -> Caller:
        return await require(request, None if credentials is None else credentials.credentials, role, scope)

    return check


async def _caller(request: Request) -> Caller:
    """The caller that the check of the endpoint's router has accepted."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def may_use(caller: Caller, model: str) -> bool:
    """Whether a key is for this model; for other keys the model does not exist."""
    return caller.models is None or model in caller.models


def require_model(caller: Caller, model: str) -> None:
    """Raise UnknownModelError unless the key is for this model."""
    if not may_use(caller, model):
        raise UnknownModelError(f"The model '{model}' does not exist.", param="model")


def notify_gateways(state: State, hashes: Collection[str]) -> None:
    """Of secrets that work no more, once it is committed. Without Redis they learn it after `key_cache_s`."""
    for cache in (state.keys, state.sessions):
        cache.forget(frozenset(hashes))
    if hashes:
        with contextlib.suppress(UnavailableError):
            state.live.note_revoked(hashes)


Client = Annotated[Caller, Depends(_caller)]
Viewer = Annotated[Caller, Depends(needs(Role.VIEWER))]
Operator = Annotated[Caller, Depends(needs(Role.OPERATOR))]
Admin = Annotated[Caller, Depends(needs(Role.ADMIN))]
NodeCaller = Annotated[Caller, Depends(needs(Role.NODE))]
