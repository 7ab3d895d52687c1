"""The API process: one FastAPI app with the OpenAI-compatible, admin, node and health faces."""

import contextlib
from collections.abc import AsyncGenerator

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.agents import AgentClient
from controlplane.api import admin, batches, errors, files, health, interactive, models, nodes
from controlplane.api.keys import KeyCache
from controlplane.api.limits import BodyLimit, RequestIds, UploadGate
from controlplane.api.metrics import Metrics
from controlplane.api.state import State
from controlplane.errors import TooLargeError
from controlplane.serving.demand import DemandCounter
from controlplane.serving.fleet import FleetCache
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store.blobs import BlobStore
from controlplane.store.live import LiveStore
from controlplane.store.session import Database, make_engine

_DESCRIPTION = """Tidepool serves many LLMs on one fleet of GPUs over several regions.

`/v1` speaks OpenAI's language (chat, completions, files, batches); `/admin` runs the fleet; `/node` is for node agents.
"""


def make_app(settings: Settings, *, agents: AgentClient | None = None) -> FastAPI:
    """The app; it connects when it starts. `agents` replaces the client to nodes (tests)."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        database = Database(make_engine(settings))
        live = LiveStore(settings)
        fleet = FleetCache(database, live, settings)
        client = agents or AgentClient(settings)
        state = State(
            settings=settings,
            database=database,
            live=live,
            blobs=BlobStore(settings.with_home() / "files"),
            keys=KeyCache(database, settings),
            fleet=fleet,
            sender=Sender(fleet, client, settings),
            demand=DemandCounter(live, gateway=True),
            metrics=Metrics(),
        )
        app.state.tidepool = state
        await fleet.start()
        async with state.demand.flushing():
            yield
        await fleet.stop()
        await client.close()
        live.close()
        database.close()

    app = FastAPI(title="Tidepool", version="0.1.0", description=_DESCRIPTION, lifespan=lifespan)
    errors.install(app)
    for router in (interactive.router, models.router, files.router, batches.router, nodes.router, health.router):
        app.include_router(router)
    app.include_router(admin.router)
    app.add_middleware(
        BodyLimit,
        bytes_max=settings.request_body_bytes_max,
        upload_bytes_max=settings.file_bytes_max,
        refuse=_refuse_body,
    )
    app.add_middleware(UploadGate)
    app.add_middleware(RequestIds)
    return app


def _refuse_body(bytes_max: int) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        error = TooLargeError(f"the body is over the limit of {bytes_max} bytes")
        await errors.error_response(Request(scope), error)(scope, receive, send)

    return refuse


class _Server(uvicorn.Server):
    """Says 503 on `/readyz` from the first SIGTERM on, while open streams finish."""

    def handle_exit(self, sig: int, frame: object) -> None:
        state = getattr(self.config.app.state, "tidepool", None) if isinstance(self.config.app, FastAPI) else None
        if isinstance(state, State):
            state.draining = True
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def serve(settings: Settings) -> None:
    """Run the API process until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        make_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=20,
        server_header=False,
    )
    _Server(config).run()
