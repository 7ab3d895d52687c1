"""Liveness, readiness and metrics. `/livez` asks nobody; `/readyz` says whether requests can be served.

Interactive requests need a view, a catalog and a key, not the servers these came from: while Postgres or Redis is away,
a gateway that has them goes on for minutes and stays ready. What needs Postgres, the Batch API above all, answers 503.
"""

from typing import Any

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from controlplane.api.state import State, StateDep
from controlplane.errors import TidepoolError

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "it cannot serve; the body says what is missing"}})
async def readyz(state: StateDep) -> JSONResponse:
    """Whether this process can serve interactive requests; what it lacks for that, and which server is away."""
    away = await run_in_threadpool(_away, state)
    missing = [*(["draining"] if state.draining else []), *state.fleet.missing()]
    if "postgres" in away and not state.keys.knows_any():
        missing.append("keys")
    status = "unavailable" if missing else "degraded" if away else "ok"
    body: dict[str, Any] = {"status": status, "missing": missing, "away": away}
    return JSONResponse(body, status_code=503 if missing else 200)


@router.get("/metrics", response_class=Response)
async def metrics(state: StateDep) -> Response:
    """Prometheus metrics."""
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _away(state: State) -> list[str]:
    away = []
    try:
        with state.database.transaction() as session:
            session.execute(text("SELECT 1"))
    except SQLAlchemyError:
        away.append("postgres")
    try:
        state.live.ping()
    except TidepoolError:
        away.append("redis")
    return away
