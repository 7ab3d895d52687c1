"""Expiring: leases of dispatchers that are gone, requests past their deadline, silent nodes, old rows and files."""

from dataclasses import dataclass

from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.demand import forget_demand
from controlplane.store.events import forget_events, note_lost
from controlplane.store.files import expire_files, known_files
from controlplane.store.instances import forget_stopped, lose_silent_nodes
from controlplane.store.keys import forget_answers
from controlplane.store.queue import expire_leases, expire_requests
from controlplane.store.request_log import forget_requests
from controlplane.store.retention import forget_forecasts, forget_plans
from controlplane.store.session import Database
from controlplane.store.usage import add_up_usage

_DAY_S = 86_400
_ORPHAN_S = 86_400.0
_NODE_LOST_S = 60.0
_NODE_GRACE_S = 20.0
_PIECE_ROWS = 5000
_PIECES_MAX = 50


@dataclass(frozen=True, kw_only=True)
class Expired:
    """How much came to its end."""

    leases: int
    requests: int
    files: int
    silent_nodes: tuple[str, ...]


def expire(database: Database, blobs: BlobStore, settings: Settings, *, now_s: float) -> Expired:
    """End what is over; running it again ends nothing more. Bytes of files go after their rows are committed."""
    with database.transaction() as session:
        requests = expire_requests(session)
        leases = expire_leases(session, attempts_max=settings.niw_attempts_max)
        silent = lose_silent_nodes(
            session, silent_s=_NODE_LOST_S, heard_s=settings.heartbeat_stale_s, grace_s=_NODE_GRACE_S
        )
        note_lost(session, silent)
        if settings.demand_keep_days is not None:
            forget_demand(session, before_s=int(now_s) - settings.demand_keep_days * _DAY_S)
        forget_stopped(session, keep_s=settings.instance_keep_days * _DAY_S)
        gone = expire_files(session)
        forget_answers(session, keep_s=_DAY_S)
    for file_id in gone:
        blobs.delete(file_id)
    _forget_requests(database, keep_s=settings.request_log_keep_s)
    return Expired(leases=leases, requests=requests, files=len(gone), silent_nodes=tuple(silent))


def _forget_requests(database: Database, *, keep_s: float) -> None:
    """Delete old rows of the request log, in small pieces; what is left then is for the next time."""
    for _ in range(_PIECES_MAX):
        with database.transaction() as session:
            if forget_requests(session, keep_s=keep_s, count_max=_PIECE_ROWS) < _PIECE_ROWS:
                return


def sweep(database: Database, blobs: BlobStore, settings: Settings, *, now_s: float) -> int:
    """Delete bytes that no row knows of, a day after they were written: what uploads and crashes left behind; and
    plans, forecasts, events and usage that are too old.
    """
    with database.transaction() as session:
        forget_plans(session, keep_s=settings.plan_keep_days * _DAY_S)
        forget_forecasts(session, before_s=int(now_s) - settings.forecast_keep_days * _DAY_S)
        forget_events(session, keep_s=settings.event_keep_days * _DAY_S)
        add_up_usage(session, older_s=_DAY_S, keep_s=settings.usage_keep_days * _DAY_S)
    old = blobs.older_than(_ORPHAN_S)
    with database.transaction() as session:
        orphans = old - known_files(session, old)
    for name in orphans:
        blobs.delete(name)
    return len(orphans)
