"""What dispatchers wait for, sent by Postgres (NOTIFY) when the transaction that changed it commits.

A notification only wakes: what is due is read from the tables, so one that is lost delays work until the next poll, and
one too many costs a statement. LISTEN needs a session of its own: behind a proxy that pools by transaction none
arrives, and dispatchers work at the interval of their polls.
"""

import asyncio
import contextlib
from collections.abc import Callable
from enum import StrEnum

import psycopg
import structlog
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from controlplane.database_address import libpq_url
from controlplane.settings import Settings
from controlplane.store.session import connect_args, defer

log = structlog.get_logger()
_CHANNEL = "tidepool_batches"
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 5.0


class Wake(StrEnum):
    """The work that there may be: batches to validate, requests to release, batches to finalize."""

    VALIDATE = "validate"
    RELEASE = "release"
    FINALIZE = "finalize"


def notify(session: Session, *wakes: Wake, delay_s: float = 0.0) -> None:
    """Tell all dispatchers, when this transaction commits, what they will find in `delay_s` seconds."""
    defer(session, select(*(notified(wake, delay_s=delay_s) for wake in wakes)))


def notified(wake: Wake, *, delay_s: float = 0.0) -> ColumnElement[None]:
    """`notify` as a column of what another statement returns."""
    return func.pg_notify(_CHANNEL, f"{wake} {delay_s:.3f}")


async def listen(settings: Settings, woken: Callable[[Wake, float], None]) -> None:
    """Call `woken` for each notification with its delay (seconds) until cancelled, on a connection of its own. While
    Postgres is unavailable, connect again with backoff; what was missed meanwhile is unknown, so everything is woken.
    """
    retry_s = _RETRY_MIN_S
    while True:
        with contextlib.suppress(psycopg.Error):
            async with await _connect(settings) as connection:
                await connection.execute(f"LISTEN {_CHANNEL}")
                retry_s = _RETRY_MIN_S
                for wake in Wake:
                    woken(wake, 0.0)
                async for notification in connection.notifies():
                    what, _, delay_s = notification.payload.partition(" ")
                    with contextlib.suppress(ValueError):  # of a newer version
                        woken(Wake(what), float(delay_s))
        log.warning("no notifications from Postgres: batches wait for the next poll", retry_s=retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _RETRY_MAX_S)


async def _connect(settings: Settings) -> psycopg.AsyncConnection[tuple[object, ...]]:
    address = libpq_url(settings.database_url.get_secret_value())
    return await psycopg.AsyncConnection.connect(address, autocommit=True, **connect_args(settings))
