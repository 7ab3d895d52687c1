"""Jobs that expire leases, requests and files, and that delete old rows. Every job has its own transactions, so that a
slow or failing job neither delays nor rolls back the others.
"""

import random
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.errors import TidepoolError
from controlplane.planner.runs import JobsRun, run_jobs
from controlplane.policies.limit_shares import FLOOR_LEASE_S
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.mirrored import MirroredBlobs
from controlplane.store.console import ConsoleFlow, ConsoleLink, ConsoleSession
from controlplane.store.demand import forget_demand, forget_forecasts, forget_measured_minutes, score_forecasts
from controlplane.store.events import Event, note_lost
from controlplane.store.files import expire_files, known_files
from controlplane.store.instances import forget_stopped, lose_silent_nodes
from controlplane.store.keys import IdempotencyKey
from controlplane.store.limit_shares import LimitShareRow
from controlplane.store.objectives import forget_objectives
from controlplane.store.plans import forget_plans
from controlplane.store.profile_corrections import forget_windows
from controlplane.store.queue import expire_leases, expire_requests, overdue_batches
from controlplane.store.request_log import LoggedRequest
from controlplane.store.responses import ResponseRow
from controlplane.store.rows import delete_older
from controlplane.store.session import Database
from controlplane.store.token_budgets import forget_budgets
from controlplane.store.usage import UsageHour, add_up_usage
from controlplane.store.what_if import WhatIfRun, fail_lost_runs

log = structlog.get_logger()
Item = TypeVar("Item")
Done = TypeVar("Done")
_DAY_S = 86_400
_ORPHAN_S = 86_400.0
_SETTLED_S = 60.0
"""A file of that age is not being written any more."""
_OBJECTIVES_KEEP_S = 8 * _DAY_S
_LOADS_KEEP_S = 2 * _DAY_S
_WHAT_IF_LOST_S = 120.0
_NODE_LOST_S = 60.0
_NODE_GRACE_S = 20.0
_PIECE_ROWS = 5000
"""Rows that one transaction deletes or changes, which takes a fraction of a second."""
_PIECES_EXPIRED_MAX, _PIECES_SWEPT_MAX = 50, 200
"""Transactions of one job in one run; the next run continues. `expire` has few, since other jobs wait for its next run.
"""
_FAULTS_MAX = 10
"""After so many items have failed, not they are at fault, but Postgres or the store for files does not answer."""


def expire(database: Database, blobs: BlobStore, settings: Settings) -> JobsRun:
    """Expire requests, leases, nodes and files that are over; a second run changes nothing more."""
    return run_jobs(
        {
            "silent_nodes": partial(_once, database, partial(_lose_nodes, heard_s=settings.heartbeat_stale_s)),
            "requests": partial(_expire_requests, database),  # of large batches it takes long
            "leases": partial(
                _in_pieces,
                database,
                partial(expire_leases, attempts_max=settings.niw_attempts_max),
                _PIECES_EXPIRED_MAX,
            ),
            "files": partial(_expire_files, database, blobs),
            "what_if_runs": partial(_once, database, partial(fail_lost_runs, silent_s=_WHAT_IF_LOST_S)),
            "request_log": partial(
                _in_pieces,
                database,
                partial(delete_older, column=LoggedRequest.ended_at, keep_s=settings.request_log_keep_s),
                _PIECES_EXPIRED_MAX,
            ),
        }
    )


def sweep(database: Database, blobs: BlobStore, settings: Settings, *, now_s: float) -> JobsRun:
    """Delete old rows, and blobs that no row refers to; sum up what is too much to sum up when it is asked for."""
    at_s = int(now_s)
    old: dict[str, Callable[..., int]] = {
        "measured_minutes": partial(forget_measured_minutes, before_s=at_s - settings.demand_keep_days * _DAY_S),
        "demand": partial(forget_demand, before_s=at_s - settings.demand_keep_days * _DAY_S),
        "forecasts": partial(forget_forecasts, before_s=at_s - settings.forecast_keep_days * _DAY_S),
        "load_windows": partial(forget_windows, before_s=at_s - _LOADS_KEEP_S),
        "objectives": partial(forget_objectives, before_s=at_s - _OBJECTIVES_KEEP_S),
        "plans": partial(forget_plans, keep_s=settings.plan_keep_days * _DAY_S),
        "events": partial(delete_older, column=Event.at, keep_s=settings.event_keep_days * _DAY_S),
        "stopped_instances": partial(forget_stopped, keep_s=settings.instance_keep_days * _DAY_S),
        "responses": partial(delete_older, column=ResponseRow.created_at, keep_s=settings.response_keep_days * _DAY_S),
        "console_sessions": partial(delete_older, column=ConsoleSession.ends_at, keep_s=_DAY_S),
        "console_links": partial(delete_older, column=ConsoleLink.ends_at, keep_s=_DAY_S),
        "console_flows": partial(delete_older, column=ConsoleFlow.ends_at, keep_s=_DAY_S),
        "token_budgets": partial(forget_budgets, keep_s=settings.usage_keep_days * _DAY_S),
        "limit_shares": partial(delete_older, column=LimitShareRow.ends_at, keep_s=FLOOR_LEASE_S),
        "idempotency_keys": partial(delete_older, column=IdempotencyKey.created_at, keep_s=_DAY_S),
        "what_if_runs": partial(delete_older, column=WhatIfRun.created_at, keep_s=settings.what_if_keep_days * _DAY_S),
        "usage": partial(delete_older, column=UsageHour.hour, keep_s=settings.usage_keep_days * _DAY_S),
    }
    jobs = {name: partial(_in_pieces, database, forget, _PIECES_SWEPT_MAX) for name, forget in old.items()}
    return run_jobs(
        {
            **jobs,
            "usage_added_up": partial(_once, database, partial(add_up_usage, older_s=_DAY_S)),
            "forecasts_scored": partial(_once, database, partial(score_forecasts, now_s=at_s)),
            "blobs": partial(_delete_orphans, database, blobs),
            "file_copies": partial(_copy_files, database, blobs),
        }
    )


def _once(database: Database, job: Callable[[Session], int]) -> int:
    """A job in one transaction."""
    with database.transaction() as session:
        return job(session)


def _in_pieces(database: Database, job: Callable[..., int], pieces_max: int) -> int:
    """A job on many rows, in short transactions, a bounded number of them."""
    done = 0
    for _ in range(pieces_max):
        with database.transaction() as session:
            count = job(session, count_max=_PIECE_ROWS)
        done += count
        if count < _PIECE_ROWS:
            break
    return done


def _each(items: Collection[Item], job: Callable[[Item], Done]) -> list[Done]:
    """What a job returns for each item. One that fails holds up none of the others, and the first error is raised when
    they are done, or after `_FAULTS_MAX` errors: as the order is random, the same items do not fail first each time.
    """
    done: list[Done] = []
    faults: list[Exception] = []
    for item in random.sample(list(items), len(items)):
        try:
            done.append(job(item))
        except (SQLAlchemyError, OSError, TidepoolError) as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("a job goes on without an item", item=item, error=text)
            faults.append(error)
            if len(faults) == _FAULTS_MAX:
                break
    if faults:
        raise faults[0]
    return done


def _expire_requests(database: Database) -> int:
    """Expire the requests of overdue batches, each batch in a transaction of its own."""
    with database.transaction() as session:
        overdue = overdue_batches(session)
    return sum(_each(overdue, lambda number: _once(database, partial(expire_requests, number=number))))


def _lose_nodes(session: Session, *, heard_s: float) -> int:
    """How many nodes became silent since the last run."""
    silent = lose_silent_nodes(session, silent_s=_NODE_LOST_S, heard_s=heard_s, grace_s=_NODE_GRACE_S)
    return note_lost(session, silent)


def _expire_files(database: Database, blobs: BlobStore) -> int:
    """Delete rows first and their blobs after the commit; blobs that remain then are orphans."""
    with database.transaction() as session:
        gone = expire_files(session)
    return len(_each(gone, blobs.delete))


def _delete_orphans(database: Database, blobs: BlobStore) -> int:
    """Delete blobs a day old that no row refers to, from uploads and crashes."""
    old = blobs.older_than(_ORPHAN_S)
    with database.transaction() as session:
        orphans = old - known_files(session, old)
    return len(_each(orphans, blobs.delete))


def _copy_files(database: Database, blobs: BlobStore) -> int:
    """Copy files that only one of two stores has."""
    if not isinstance(blobs, MirroredBlobs):
        return 0
    alone = blobs.lacking_a_copy(_SETTLED_S)
    with database.transaction() as session:
        known = known_files(session, alone)
    return sum(_each(known, blobs.copy_missing))
