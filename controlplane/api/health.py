"""Liveness, readiness and metrics. `/livez` asks nobody; `/readyz` says whether requests can be served."""

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
    """Whether this process can serve, and what it lacks."""
    missing = await run_in_threadpool(_missing, state)
    body: dict[str, Any] = {"status": "ok" if not missing else "unavailable", "missing": missing}
    return JSONResponse(body, status_code=503 if missing else 200)


@router.get("/metrics", response_class=Response)
async def metrics(state: StateDep) -> Response:
    """Prometheus metrics."""
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _missing(state: State) -> list[str]:
    missing = ["draining"] if state.draining else []
    try:
        with state.database.transaction() as session:
            session.execute(text("SELECT 1"))
    except SQLAlchemyError:
        missing.append("postgres")
    try:
        state.live.ping()
    except TidepoolError:
        missing.append("redis")
    if not state.fleet.is_fresh():
        missing.append("live view")
    return missing
