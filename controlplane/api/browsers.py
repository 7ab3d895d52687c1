"""Requests of browsers: the cookie of a session, where it is accepted, and proof that our own page sent the request.

A browser sends its cookies with whatever page makes it send a request. So a request that may change something must also
have the session's CSRF token, which other pages cannot read, and what the browser says of its origin must be ours.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from controlplane.errors import PermissionDeniedError
from controlplane.settings import Settings

CSRF_HEADER = "X-CSRF-Token"
SESSION_COOKIE = "tidepool_session"
_SESSION_PLACES = ("/admin", "/ui", "/v1/batches", "/v1/chat/completions", "/v1/files", "/v1/models")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PORTS = {"http": 80, "https": 443}


def root_of(scope: Scope) -> str:
    """What a proxy puts before our paths; usually empty."""
    return str(scope.get("root_path", "")).rstrip("/")


def route_path(scope: Scope) -> str:
    """The path of a request as routes name it."""
    return str(scope["path"]).removeprefix(root_of(scope))


def session_secret(request: Request) -> str | None:
    """The secret in a request's session cookie, where sessions are accepted and the request presents nothing else."""
    if "authorization" in request.headers or "x-api-key" in request.headers:
        return None
    path = route_path(request.scope)
    accepted = any(path == place or path.startswith(f"{place}/") for place in _SESSION_PLACES)
    return cookie_of(request, SESSION_COOKIE) if accepted else None


def csrf_token(secret: str) -> str:
    """The CSRF token of the session with this secret; nothing follows from it about the secret."""
    return hashlib.sha256(f"csrf:{secret}".encode()).hexdigest()


def require_own_page(request: Request, settings: Settings, *, secret: str | None) -> None:
    """See that a page of ours sent a request that has a session cookie. `secret`: of the session; None: there is none
    yet.

    Raises:
        PermissionDeniedError: another site's page sent it, or it changes something and lacks the session's CSRF token.
    """
    site = request.headers.get("sec-fetch-site")
    if request.method in _SAFE_METHODS:
        if site == "cross-site":
            raise PermissionDeniedError("Sec-Fetch-Site: a page of another site sent this request")
        return
    if site is not None and site != "same-origin":
        raise PermissionDeniedError("Sec-Fetch-Site: a page of another origin sent this request")
    origin = request.headers.get("origin")
    if origin is not None and not _is_own(origin, request, settings):
        raise PermissionDeniedError(f"Origin: a page of another origin sent this request: {origin[:200]}")
    if secret is not None:
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(), csrf_token(secret).encode()):
            raise PermissionDeniedError(
                f"{CSRF_HEADER}: it must be the session's token, which GET /ui/session tells", param=CSRF_HEADER
            )


def _is_own(origin: str, request: Request, settings: Settings) -> bool:
    """Whether a header `Origin` names this API. A proxy that terminates TLS need not say so: then only the host and the
    port count.
    """
    own = request.headers.get("host", "") if settings.console_url is None else urlsplit(settings.console_url).netloc
    secure = request.url.scheme == "https" or (settings.console_url or "").startswith("https:")
    scheme, separator, host = origin.partition("://")
    if not separator or scheme not in _PORTS or (secure and scheme != "https"):
        return False
    return bool(own) and _with_port(host, scheme) == _with_port(own, scheme)


def _with_port(host: str, scheme: str) -> str:
    has_port = host.rpartition(":")[2].isdigit() and not host.endswith("]")
    return host.lower() if has_port else f"{host.lower()}:{_PORTS[scheme]}"


def cookie_of(request: Request, name: str) -> str | None:
    """The value of a cookie that `set_cookie` set."""
    return request.cookies.get(_full_name(request, name)) or None


def set_cookie(
    response: Response, request: Request, name: str, value: str, *, lasts_s: int, strict: bool = True
) -> None:
    """Set a cookie that scripts cannot read. Over TLS it is for this host alone, and never sent without TLS. `strict`:
    it is not sent with a request that another site's page begins.
    """
    response.set_cookie(
        _full_name(request, name),
        value,
        max_age=lasts_s,
        path="/",
        httponly=True,
        secure=_is_secure(request),
        samesite="strict" if strict else "lax",
    )


def drop_cookie(response: Response, request: Request, name: str) -> None:
    """Make the browser forget a cookie."""
    response.delete_cookie(_full_name(request, name), path="/", httponly=True, secure=_is_secure(request))


def _is_secure(request: Request) -> bool:
    """Whether the browser speaks TLS, with us or with a proxy that is trusted to say so."""
    return request.url.scheme == "https"


def _full_name(request: Request, name: str) -> str:
    return f"__Host-{name}" if _is_secure(request) else name
