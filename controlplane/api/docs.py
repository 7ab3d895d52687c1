"""`GET /` with the paths of the API, and its documentation at `/docs`, which loads nothing from other servers."""

import gzip
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, JSONResponse, Response

from controlplane.errors import NotFoundError

router = APIRouter(include_in_schema=False)
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}
_ASSETS = {
    name: (files("controlplane.api") / "assets" / f"{name}.gz").read_bytes()
    for name in ("swagger-ui-bundle.js", "swagger-ui.css")
}
_SAME_ORIGIN_ONLY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
_ICON = "data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22/>"
PLACES = {
    "openai_base_url": "/v1",
    "models": "/v1/models",
    "console": "/ui/",
    "documentation": "/docs",
    "openapi": "/openapi.json",
    "health": "/health",
    "readiness": "/readyz",
    "liveness": "/livez",
    "metrics": "/metrics",
    "admin": "/admin/status",
}


@router.get("/")
async def root(request: Request) -> Response:
    """The paths of the API, as JSON, or as a page for browsers."""
    base = request.scope.get("root_path", "").rstrip("/")
    places = {name: base + path for name, path in PLACES.items()}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"name": "tidepool", "version": request.app.version} | places)
    links = "".join(f'<li>{name}: <a href="{path}">{path}</a></li>' for name, path in places.items())
    return HTMLResponse(f"<!DOCTYPE html><title>Tidepool</title><h1>Tidepool</h1><ul>{links}</ul>")


@router.get("/docs")
async def documentation(request: Request) -> HTMLResponse:
    """Swagger UI."""
    base = request.scope.get("root_path", "").rstrip("/")
    page = get_swagger_ui_html(
        openapi_url=f"{base}/openapi.json",
        title="Tidepool",
        swagger_js_url=f"{base}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{base}/docs/swagger-ui.css",
        swagger_favicon_url=_ICON,
        swagger_ui_parameters={"validatorUrl": None},  # it would ask validator.swagger.io
    )
    page.headers["Content-Security-Policy"] = _SAME_ORIGIN_ONLY
    return page


@router.get("/docs/{name}")
async def asset(name: str, request: Request) -> Response:
    """A file of Swagger UI, compressed unless the client asks otherwise."""
    content = _ASSETS.get(name)
    if content is None:
        raise NotFoundError(f"no such path: GET {request.url.path}")
    headers: dict[str, Any] = {"Cache-Control": "public, max-age=86400", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        content = gzip.decompress(content)
    return Response(content, media_type=_MEDIA_TYPES[PurePath(name).suffix], headers=headers)
