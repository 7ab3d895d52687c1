"""What one API process holds, and the dependencies that hand it to endpoints."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import anyio
from fastapi import Depends, Request
from sqlalchemy.orm import Session

from controlplane.api.credentials import KeyCache
from controlplane.api.metrics import Metrics
from controlplane.api.tenant_limits import LimitKeeper
from controlplane.serving.admission import AdmissionController
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.offered_load import OfferedLoad
from controlplane.serving.request_log import RequestLog
from controlplane.serving.send import Sender
from controlplane.serving.usage import UsageCounter
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database


@dataclass(kw_only=True)
class BeatThreads:
    """Threads of heartbeats, apart from those of requests, and by server: a Postgres that hangs keeps only its own.
    `writing`: nodes whose heartbeat is on its way into Postgres.
    """

    redis: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(8))
    postgres: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(10))
    writing: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class State:
    """Everything a request may need. `draining`: finish streams, take nothing new."""

    settings: Settings
    database: Database
    live: LiveStore
    blobs: BlobStore
    keys: KeyCache
    fleet: FleetCache
    sender: Sender
    admission: AdmissionController
    demand: DemandCounter
    offered: OfferedLoad
    metrics: Metrics
    limits: LimitKeeper
    usage: UsageCounter
    requests: RequestLog
    beats: BeatThreads = field(default_factory=BeatThreads)
    postgres_probes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    redis_probes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    draining: bool = False
    schema_fits: bool = False
    """Whether the database was seen with a schema that this version can use."""


def state_of(request: Request) -> State:
    """The process's state."""
    state = request.app.state.tidepool
    assert isinstance(state, State)
    return state


async def _state(request: Request) -> State:
    """`state_of` as a dependency: a plain function would wait for a thread, and a Postgres that hangs may hold all."""
    return state_of(request)


StateDep = Annotated[State, Depends(_state)]


def transaction(state: StateDep) -> Iterator[Session]:
    """One transaction for one request, committed before the answer goes out."""
    with state.database.transaction() as session:
        yield session


SessionDep = Annotated[Session, Depends(transaction, scope="function")]
