"""The API process: one FastAPI app with the OpenAI-compatible, admin, node and health endpoints."""

import contextlib
import functools
import socket
from collections.abc import AsyncGenerator

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from controlplane.api import admin, docs, errors, health, nodes, own_requests
from controlplane.api.admin.overview import overviews_of
from controlplane.api.anthropic import messages
from controlplane.api.auth import needs
from controlplane.api.connections import connection_class
from controlplane.api.console import files as console_files
from controlplane.api.console import links as console_links
from controlplane.api.console import oidc as console_oidc
from controlplane.api.console import sessions as console_sessions
from controlplane.api.console.built_files import built_console
from controlplane.api.console.files import ConsoleHeaders
from controlplane.api.console.provider import OpenIdProvider
from controlplane.api.credentials import KeyCache, SessionCache, following_revocations
from controlplane.api.direct import DirectRoutes, direct_routes
from controlplane.api.limit_shares import RegionShares
from controlplane.api.methods import HeadRequests, allow_origins
from controlplane.api.metrics import Metrics
from controlplane.api.openai import batches, chat, files, models, pooling, responses, tokens
from controlplane.api.openai.openapi import DocumentedApi
from controlplane.api.process_group import GroupMember, bound_sockets
from controlplane.api.request_limits import AnswerHeaders, RequestLimits
from controlplane.api.request_log import RequestRecords
from controlplane.api.state import State
from controlplane.api.tenant_limits import LimitKeeper
from controlplane.api.token_budgets import TokenBudgets
from controlplane.api.tracing import Traces
from controlplane.serving.admission import AdmissionController
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.anthropic.requests import MESSAGES
from controlplane.serving.background_responses import BackgroundResponses
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.garbage import collect_less_often
from controlplane.serving.node_questions import NodeQuestions
from controlplane.serving.objectives import ObjectiveCounter
from controlplane.serving.offered_load import OfferedLoad
from controlplane.serving.openai_requests import CHAT, COMPLETIONS
from controlplane.serving.pooling_requests import EMBEDDINGS, RERANK, SCORE
from controlplane.serving.regional_reads import RegionalReads
from controlplane.serving.request_log import RequestLog
from controlplane.serving.rerouting import Rerouter
from controlplane.serving.send import Sender
from controlplane.serving.stored_responses import StoredResponses
from controlplane.serving.usage import UsageCounter
from controlplane.settings import Settings
from controlplane.store.blobs.open import open_blobs
from controlplane.store.keys import KeyScope
from controlplane.store.redis.limit_shares import ShareStore
from controlplane.store.redis.limits import LimitStore
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role

_DESCRIPTION = """Tidepool serves many LLMs on one fleet of GPUs over several regions.

`/v1` speaks OpenAI's language (chat, completions, responses, embeddings, files, batches), `/v1/messages` Anthropic's;
`/admin` runs the fleet; `/node` is for node agents.
"""


_DIRECT = direct_routes(
    {
        CHAT: chat.chat,
        COMPLETIONS: chat.completions,
        MESSAGES: messages.create,
        EMBEDDINGS: pooling.embeddings,
        SCORE: pooling.score,
        RERANK: pooling.rerank,
    }
)


def make_app(settings: Settings, *, agents: AgentClient | None = None, member: GroupMember | None = None) -> FastAPI:
    """The app; it connects when it starts. `agents` replaces the client to nodes (tests). `member`: the process is one
    of several that share a port.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        client = agents or AgentClient(settings)
        state = _state_of_process(settings, client, member)
        app.state.tidepool = state
        app.state.overviews = overviews_of(state)
        rerouter = Rerouter(state.fleet, state.sender, settings, on_move=state.metrics.note_reroute)
        telling = contextlib.nullcontext() if member is None else member.telling(lambda: health.own_metrics(state))
        try:
            async with (
                state.requests.running(),
                state.reads.following(),
                state.fleet.following(),
                rerouter.running(),
                state.demand.flushing(),
                state.usage.flushing(),
                state.objectives.flushing(),
                state.limits.running(),
                following_revocations(state.live, state.keys, state.sessions),
                state.background.running(),
                telling,
            ):
                yield
        finally:
            await client.close()
            state.live.close()
            state.database.close()

    app = DocumentedApi(
        title="Tidepool",
        version="0.1.0",
        description=_DESCRIPTION,
        lifespan=lifespan,
        routes=_routes(),
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `Traces` and `Metrics` are this process's
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    _wrap(app, settings)
    return app


@functools.cache
def _routes() -> list[BaseRoute]:
    """The routes of every app of this process: FastAPI builds their validators at the first request, and keeps them."""
    api = APIRouter()
    for scope, router in (
        (KeyScope.CHAT, chat.router),
        (KeyScope.CHAT, responses.router),
        (KeyScope.CHAT, messages.router),
        (KeyScope.CHAT, tokens.router),
        (KeyScope.CHAT, pooling.router),
        (KeyScope.CHAT, own_requests.router),
        (KeyScope.MODELS, models.router),
        (KeyScope.FILES, files.router),
        (KeyScope.BATCH, batches.router),
    ):
        api.include_router(router, dependencies=[Depends(needs(Role.CLIENT, scope))])
    for router in (
        nodes.router,
        health.router,
        admin.router,
        docs.router,
        console_sessions.router,
        console_links.router,
        console_oidc.router,
        console_files.router,
    ):
        api.include_router(router)
    return api.routes


def _state_of_process(settings: Settings, client: AgentClient, member: GroupMember | None) -> State:
    """What the process holds; connections are made when they are first used."""
    database = Database(make_engine(settings))
    live = LiveStore(settings)
    reads = RegionalReads(database, settings)
    fleet = FleetCache(reads, live, settings)
    demand = DemandCounter(live, gateway=True)
    metrics = Metrics()
    sender = Sender(fleet, client, settings)
    admission = AdmissionController(sender, fleet, settings)
    metrics.watch_flex(lambda: admission.waiting)
    stored = StoredResponses(database, settings)
    return State(
        settings=settings,
        database=database,
        live=live,
        blobs=open_blobs(settings),
        reads=reads,
        keys=KeyCache(reads, settings),
        sessions=SessionCache(reads, settings),
        console=built_console(),
        provider=None if settings.oidc_issuer is None else OpenIdProvider(settings),
        fleet=fleet,
        sender=sender,
        questions=NodeQuestions(fleet, client, settings),
        admission=admission,
        demand=demand,
        offered=OfferedLoad(demand),
        metrics=metrics,
        limits=LimitKeeper(
            LimitStore(settings),
            metrics,
            settings,
            TokenBudgets(database, metrics, settings),
            _shares(database, metrics, settings),
        ),
        usage=UsageCounter(database),
        objectives=ObjectiveCounter(database),
        requests=RequestLog(database, settings, on_drop=metrics.request_log_dropped.inc),
        responses=stored,
        background=BackgroundResponses(stored, count_max=settings.background_responses_max),
        member=member,
    )


def _shares(database: Database, metrics: Metrics, settings: Settings) -> RegionShares | None:
    """The region's shares of limits; None: all gateways count in one Redis."""
    if not settings.limit_shares or settings.region is None:
        return None
    return RegionShares(settings.region, ShareStore(settings), database, metrics, settings)


def _wrap(app: FastAPI, settings: Settings) -> None:
    """Put the wrappers around the app; the last is the outermost."""
    app.add_middleware(DirectRoutes, routes=_DIRECT)
    app.add_middleware(RequestLimits, settings=settings)
    app.add_middleware(RequestRecords)
    app.add_middleware(Traces)
    app.add_middleware(ConsoleHeaders)
    allow_origins(app, settings)
    app.add_middleware(AnswerHeaders)
    app.add_middleware(HeadRequests)


class _Server(uvicorn.Server):
    """Answers 503 on `/readyz` from the first SIGTERM on, while open streams finish."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        collect_less_often()

    def handle_exit(self, sig: int, frame: object) -> None:
        state = getattr(self.config.app.state, "tidepool", None) if isinstance(self.config.app, FastAPI) else None
        if isinstance(state, State):
            state.draining = True
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """The configuration of the API process's server."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=20,
        server_header=False,
        ws="none",
        http=connection_class(settings),  # type: ignore[arg-type]
    )


def serve(settings: Settings, member: GroupMember | None = None) -> None:
    """Run the API process until SIGTERM or SIGINT. `member`: it is one of several that share the port.

    Raises:
        InvalidValueError: the port is in use, or the system cannot share it.
    """
    sockets = bound_sockets(settings.host, settings.port, shared=member is not None)
    _Server(server_config(make_app(settings, member=member), settings)).run(sockets)
