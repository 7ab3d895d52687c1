"""What one API process holds, and the dependencies that hand it to endpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.orm import Session

from controlplane.api.keys import KeyCache
from controlplane.api.metrics import Metrics
from controlplane.api.tenant_limits import LimitKeeper
from controlplane.serving.admission import Door
from controlplane.serving.demand import DemandCounter
from controlplane.serving.fleet import FleetCache
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store.blobs import BlobStore
from controlplane.store.live import LiveStore
from controlplane.store.session import Database


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
    door: Door
    demand: DemandCounter
    metrics: Metrics
    limits: LimitKeeper
    draining: bool = False


def state_of(request: Request) -> State:
    """The process's state."""
    state = request.app.state.tidepool
    assert isinstance(state, State)
    return state


def transaction(state: Annotated[State, Depends(state_of)]) -> Iterator[Session]:
    """One transaction for one request, committed before the answer goes out."""
    with state.database.transaction() as session:
        yield session


StateDep = Annotated[State, Depends(state_of)]
SessionDep = Annotated[Session, Depends(transaction, scope="function")]
