"""Liveness, readiness and metrics. `/livez` queries no server; `/readyz` reports whether requests can be served.

Interactive requests need a live view, a catalog and a key, but not Postgres and Redis themselves: while one of them is
unavailable, a gateway serves from its caches for minutes, and from the region's standby of Postgres, if there is one,
for hours, and stays ready. What needs the primary, such as the Batch API,
answers 503. `read_health` decides for all: probes, `/admin/status` and with it the command line, and metrics.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from controlplane.api.state import State, StateDep
from controlplane.api.system_metrics import SystemMetrics, render_system
from controlplane.errors import SchemaError, UnavailableError
from controlplane.planner.runs import loop_periods_s
from controlplane.policies.readiness import (
    Health,
    HealthFacts,
    HealthStatus,
    LoopFacts,
    choose_health,
    choose_late_loops,
)
from controlplane.serving.regional_reads import ReplicaState
from controlplane.store.fleet import lost_nodes
from controlplane.store.log_position import takes_writes
from controlplane.store.loop_runs import read_loop_runs
from controlplane.store.schema import check_schema
from controlplane.store.system_facts import read_system_facts
from controlplane.store.terms import read_term

router = APIRouter(tags=["health"])
_ANSWERS_WITHIN_S = 2.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What Postgres knows of the system's health: its own Unix time, the loops' runs, and lost nodes; or only the fault
    of its schema. `read_only`: the server that answers takes no writes, so no primary is there. `term`,
    `reported_term`: as in `HealthFacts`.
    """

    now_s: float = 0.0
    loops: tuple[LoopFacts, ...] = ()
    lost: tuple[str, ...] = ()
    schema_fault: str | None = None
    read_only: bool = False
    term: int | None = None
    reported_term: int | None = None


@dataclass(frozen=True, kw_only=True)
class SystemHealth:
    """The verdict and its facts; `stored` is empty while Postgres is unavailable."""

    verdict: Health
    stored: Stored


async def read_health(state: StateDep) -> SystemHealth:
    """Query both servers, each for two seconds at most, and decide."""
    stored = await _answer(lambda: _read_stored(state), state.postgres_probes)
    redis = await _answer(lambda: _ping(state), state.redis_probes)
    away = [name for name, answer in (("postgres", stored), ("redis", redis)) if answer is None]
    if stored is not None and stored.read_only:
        away.insert(0, "postgres")
    replica = state.reads.replica_state()
    away += ["replica"] if replica is ReplicaState.AWAY else []
    missing = [*(["draining"] if state.draining else []), *state.fleet.missing()]
    confirmed = stored is not None or state.reads.has_replica(state.settings.key_revocation_max_age_s)
    if not confirmed and not state.keys.knows_any():
        missing.append("keys")
    known = stored or Stored()
    if known.schema_fault is not None:
        missing.append(known.schema_fault)
    late = choose_late_loops(known.loops, known.now_s, loop_periods_s(state.settings))
    age_s = state.reads.replica_age_s()
    facts = HealthFacts(
        missing=tuple(missing),
        away=tuple(away),
        late=late,
        lost=known.lost,
        behind=("replica",) if replica is ReplicaState.BEHIND else (),
        replica_age_s=None if age_s is None else round(age_s, 1),
        term=known.term,
        reported_term=known.reported_term,
    )
    verdict = choose_health(facts)
    return SystemHealth(verdict=verdict, stored=known)


HealthDep = Annotated[SystemHealth, Depends(read_health)]


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Answers while the process runs."""
    return {"status": "ok"}


@router.get("/health", response_class=Response, responses={503: {"description": "it cannot serve; see /readyz"}})
async def health(state: StateDep) -> Response:
    """Whether requests can be served, for load balancers and clients of vLLM: 200 or 503, without a body. It asks no
    server; `/readyz` does, and says what is missing.
    """
    return Response(status_code=503 if state.draining or state.fleet.missing() else 200)


@router.get("/readyz", responses={503: {"description": "it cannot serve; the body says what is missing"}})
async def readyz(health: HealthDep) -> JSONResponse:
    """Whether this process can serve interactive requests: what it lacks for that, which servers are away, which loops
    are late and which nodes are lost. Only what is missing makes it 503.
    """
    unavailable = health.verdict.status == HealthStatus.UNAVAILABLE
    return JSONResponse(asdict(health.verdict), status_code=503 if unavailable else 200)


@router.get("/metrics", response_class=Response)
async def metrics(state: StateDep, health: HealthDep) -> Response:
    """Prometheus metrics: this process's, or those of all that share its port, each series with its `process`; and
    those of the whole system.
    """
    system = (
        await _answer(lambda: _render_system(state, health), state.postgres_probes) if health.stored.loops else None
    )
    if system is None:
        system = render_system(SystemMetrics(health.verdict, health.stored.loops, None))
    return Response(await group_metrics(state) + system, media_type="text/plain; version=0.0.4; charset=utf-8")


async def group_metrics(state: State) -> bytes:
    """The metrics of all processes that share the port, without those of the system."""
    own = own_metrics(state)
    return own if state.member is None else await state.member.all_metrics(own)


def own_metrics(state: State) -> bytes:
    """The metrics of this process alone."""
    state.metrics.expect(model.name for model in state.fleet.models())
    state.metrics.keep_instances({each.instance_id for each in state.fleet.instances()})
    return state.metrics.render()


def _read_stored(state: State) -> Stored:
    if not state.schema_fits:  # a schema that fits is checked once
        try:
            check_schema(state.database)
        except SchemaError as error:
            return Stored(schema_fault=error.message)
        state.schema_fits = True
    with state.database.transaction() as session:
        now_s, loops = read_loop_runs(session)
        lost = lost_nodes(session, alive_s=state.settings.heartbeat_stale_s)
        term = read_term(session)
        return Stored(
            now_s=now_s,
            loops=loops,
            lost=lost,
            read_only=not takes_writes(session),
            term=None if term is None else term.term,
            reported_term=None if term is None else term.reported,
        )


def _render_system(state: State, health: SystemHealth) -> bytes:
    """The metrics of the system; of a large fleet they take long to read and to write, so a thread does both."""
    settings = state.settings
    with state.database.transaction() as session:
        facts = read_system_facts(session, alive_s=settings.heartbeat_stale_s, quantile=settings.forecast_quantile)
    return render_system(SystemMetrics(health.verdict, health.stored.loops, facts))


def _ping(state: State) -> bool:
    state.live.ping()
    return True


async def _answer(ask: Callable[[], Answer], threads: anyio.CapacityLimiter) -> Answer | None:
    """What a server answers; None: nothing in time. A server that hangs blocks only its own threads and no probe."""
    try:
        with anyio.move_on_after(_ANSWERS_WITHIN_S):
            return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=threads)
    except (SQLAlchemyError, UnavailableError):
        return None
    return None
