"""Liveness, readiness and metrics. `/livez` asks nobody; `/readyz` says whether requests can be served.

Interactive requests need a view, a catalog and a key, not the servers these came from: while Postgres or Redis is away,
a gateway that has them goes on for minutes and stays ready. What needs Postgres, the Batch API above all, answers 503.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from controlplane.api.state import State, StateDep
from controlplane.errors import SchemaError, UnavailableError
from controlplane.store.schema import check_schema

router = APIRouter(tags=["health"])
_ANSWERS_WITHIN_S = 2.0


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/health", response_class=Response, responses={503: {"description": "it cannot serve; see /readyz"}})
async def health(state: StateDep) -> Response:
    """Whether requests can be served, for load balancers and clients of vLLM: 200 or 503, without a body. It asks no
    server; `/readyz` does, and says what is missing.
    """
    return Response(status_code=503 if state.draining or state.fleet.missing() else 200)


@router.get("/readyz", responses={503: {"description": "it cannot serve; the body says what is missing"}})
async def readyz(state: StateDep) -> JSONResponse:
    """Whether this process can serve interactive requests; what it lacks for that, and which server is away."""
    asked = {"postgres": state.database.ping, "redis": state.live.ping}
    away = [name for name, ask in asked.items() if not await _answers(ask, state.probe_threads)]
    missing = [*(["draining"] if state.draining else []), *state.fleet.missing()]
    if "postgres" not in away and not state.schema_fits:
        missing += await _schema_fault(state)
    if "postgres" in away and not state.keys.knows_any():
        missing.append("keys")
    status = "unavailable" if missing else "degraded" if away else "ok"
    body: dict[str, Any] = {"status": status, "missing": missing, "away": away}
    return JSONResponse(body, status_code=503 if missing else 200)


@router.get("/metrics", response_class=Response)
async def metrics(state: StateDep) -> Response:
    """Prometheus metrics."""
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _schema_fault(state: State) -> list[str]:
    """What is wrong with the database's schema. One that fits is not looked at again."""
    try:
        state.schema_fits = await _answers(lambda: check_schema(state.database), state.probe_threads)
    except SchemaError as error:
        return [error.message]
    return []


async def _answers(ask: Callable[[], None], threads: anyio.CapacityLimiter) -> bool:
    """Whether a server answers in time. One that hangs keeps threads of its own, and no probe waits for it."""
    with anyio.move_on_after(_ANSWERS_WITHIN_S), contextlib.suppress(SQLAlchemyError, UnavailableError):
        await anyio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=threads)
        return True
    return False
