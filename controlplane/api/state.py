"""The state of one API process, and the dependencies by which endpoints get it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import anyio
from fastapi import Depends, Request
from sqlalchemy.orm import Session

from controlplane.api.console.built_files import ConsoleFiles
from controlplane.api.console.provider import OpenIdProvider
from controlplane.api.credentials import KeyCache, SessionCache
from controlplane.api.metrics import Metrics
from controlplane.api.process_group import GroupMember
from controlplane.api.tenant_limits import LimitKeeper
from controlplane.serving.admission import AdmissionController
from controlplane.serving.background_responses import BackgroundResponses
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.node_questions import NodeQuestions
from controlplane.serving.objectives import ObjectiveCounter
from controlplane.serving.offered_load import OfferedLoad
from controlplane.serving.regional_reads import RegionalReads
from controlplane.serving.request_log import RequestLog
from controlplane.serving.send import Sender
from controlplane.serving.stored_responses import StoredResponses
from controlplane.serving.usage import UsageCounter
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database


@dataclass(kw_only=True)
class BeatThreads:
    """Threads of heartbeats by server, separate from those of requests: a Postgres that hangs blocks only its own.
    `writing`: nodes whose heartbeat is being written to Postgres.
    """

    redis: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(8))
    postgres: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(10))
    writing: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class State:
    """Everything that a request may need. `draining`: it shuts down, so its probes answer 503 while what has arrived is
    served. `member`: the process is one of several that share a port.
    """

    settings: Settings
    database: Database
    live: LiveStore
    blobs: BlobStore
    reads: RegionalReads
    keys: KeyCache
    sessions: SessionCache
    console: ConsoleFiles
    provider: OpenIdProvider | None
    fleet: FleetCache
    sender: Sender
    questions: NodeQuestions
    admission: AdmissionController
    demand: DemandCounter
    offered: OfferedLoad
    metrics: Metrics
    limits: LimitKeeper
    usage: UsageCounter
    objectives: ObjectiveCounter
    requests: RequestLog
    responses: StoredResponses
    background: BackgroundResponses
    member: GroupMember | None = None
    beats: BeatThreads = field(default_factory=BeatThreads)
    postgres_probes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    redis_probes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    draining: bool = False
    schema_fits: bool = False
    """Whether the database's schema was checked and fits this version."""


def state_of(request: Request) -> State:
    """The process's state."""
    state = request.app.state.tidepool
    assert isinstance(state, State)
    return state


async def _state(request: Request) -> State:
    """`state_of` as a dependency; async, since a plain function would need a thread, and all may be blocked."""
    return state_of(request)


StateDep = Annotated[State, Depends(_state)]


def transaction(state: StateDep) -> Iterator[Session]:
    """One transaction for one request, committed before the answer goes out."""
    with state.database.transaction() as session:
        yield session


def statement(state: StateDep) -> Iterator[Session]:
    """A session whose every statement is a transaction, for requests that need only one, or only read."""
    with state.database.statement() as session:
        yield session


SessionDep = Annotated[Session, Depends(transaction, scope="function")]
StatementDep = Annotated[Session, Depends(statement, scope="function")]
