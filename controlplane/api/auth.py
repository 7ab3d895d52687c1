"""Who may do what. A key comes as `Authorization: Bearer`, or as Anthropic's clients send it, as `x-api-key`; its role
decides.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from controlplane.api.credentials import Caller
from controlplane.api.state import state_of
from controlplane.errors import AuthenticationError, PermissionDeniedError, UnknownModelError
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


async def authenticate(request: Request, credentials: Credentials) -> Caller:
    """The caller of a request.

    Raises:
        AuthenticationError: the request has no key, or an invalid one.
    """
    return await _identified(request, None if credentials is None else credentials.credentials)


async def _identified(request: Request, bearer: str | None) -> Caller:
    secret = request.headers.get("x-api-key") if bearer is None else bearer
    if not secret:
        raise AuthenticationError(NO_KEY)
    caller = await state_of(request).keys.find(secret)
    request.state.caller = caller
    return caller


async def require(request: Request, bearer: str | None, role: Role, scope: KeyScope | None = None) -> Caller:
    """The caller of a request, whose key has the rights of `role` and, for a part of `/v1`, that `scope`.

    Raises:
        AuthenticationError: the request has no key, or an invalid one.
        PermissionDeniedError: the key is not for this.
    """
    caller = await _identified(request, bearer)
    if caller.role not in MAY[role]:
        raise PermissionDeniedError(f"this needs the role '{role.value}'; the key's role is '{caller.role.value}'")
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


Client = Annotated[Caller, Depends(_caller)]
Viewer = Annotated[Caller, Depends(needs(Role.VIEWER))]
Operator = Annotated[Caller, Depends(needs(Role.OPERATOR))]
Admin = Annotated[Caller, Depends(needs(Role.ADMIN))]
NodeCaller = Annotated[Caller, Depends(needs(Role.NODE))]
