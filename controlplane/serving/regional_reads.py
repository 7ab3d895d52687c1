"""Reads of what a region needs to serve: keys, models, endpoints, limits, and the stored view.

They are read from the region's own standby of Postgres (`database_replica_url`) while it is nearly in step, so that a
request does not cross regions for them; from the primary where the standby is behind; and from the standby again while
no primary answers, within a bound that the reader names. Without a standby all are read from the primary.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError
from controlplane.policies.replica_age import LogPosition, ReplicaAge
from controlplane.serving.background import in_background
from controlplane.settings import Settings
from controlplane.store.log_position import read_log_position
from controlplane.store.session import Database, make_engine

log = structlog.get_logger()
Found = TypeVar("Found")
_LOOK_EVERY_S = 1.0
_FIRST_LOOK_S = 3.0
_RECENT_S = 5.0
"""A server that has not answered for this long counts as away."""


class ReplicaState(StrEnum):
    """There is none; it does not answer; it may be too far behind to be read while the primary answers; it is not."""

    NONE = "none"
    AWAY = "away"
    BEHIND = "behind"
    IN_STEP = "in step"


class _Server:
    """One of the two servers, and when it answered last, on the monotonic clock. `writable`: one that takes no writes,
    as a former primary does, counts as away.
    """

    def __init__(self, name: str, database: Database, *, writable: bool = False) -> None:
        self.name = name
        self.database = database
        self._writable = writable
        self._answered_s = -math.inf
        self._threads = anyio.CapacityLimiter(1)
        self._told_away = False

    def answers(self) -> bool:
        """Whether it has answered of late."""
        return time.monotonic() - self._answered_s <= _RECENT_S

    async def look(self, note: Callable[[LogPosition, float], None]) -> None:
        """Ask where it is in the log, in a thread of its own, and note the answer."""
        asked_s = time.monotonic()
        try:
            position = await anyio.to_thread.run_sync(self._position, limiter=self._threads, abandon_on_cancel=True)
            if self._writable and not position.takes_writes:
                raise UnavailableError("it takes no writes")
        except (SQLAlchemyError, UnavailableError) as error:
            if not self._told_away:
                log.warning("a server does not answer", server=self.name, error=str(error).splitlines()[0])
            self._told_away = True
            return
        if self._told_away:
            log.info("a server answers again", server=self.name)
        self._told_away = False
        self._answered_s = time.monotonic()
        note(position, asked_s)

    def _position(self) -> LogPosition:
        with self.database.transaction() as session:
            return read_log_position(session)


class RegionalReads:
    """Reads of one process. `following` looks at both servers every second."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._settings = settings
        self._age = ReplicaAge()
        self._primary = _Server("primary", database, writable=True)
        url = settings.database_replica_url
        self._replica = None if url is None else _Server("replica", Database(make_engine(_of_replica(settings, url))))

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Look at both servers now, for three seconds at most, and then every second while the block runs."""
        if self._replica is None:
            yield
            return
        primary, replica = self._primary, self._replica
        looks = (lambda: primary.look(self._age.note_primary), lambda: replica.look(self._age.note_replica))
        try:
            with anyio.move_on_after(_FIRST_LOOK_S):
                async with anyio.create_task_group() as group:
                    for look in looks:
                        group.start_soon(look)
            async with in_background(_repeat(looks[0])), in_background(_repeat(looks[1])):
                yield
        finally:
            replica.database.close()

    def read(
        self,
        query: Callable[[Session], Found],
        *,
        age_max_s: float = math.inf,
        counts: Callable[[Found], bool] = lambda _: True,
    ) -> tuple[Found, float]:
        """What a query finds, and how old that may be, in seconds. `counts`: whether an answer of the standby will do;
        where it will not, the primary is asked. `age_max_s`: of the standby, while no primary answers.

        Raises:
            SQLAlchemyError: no server answers.
            UnavailableError: no primary answers, and what the standby knows will not do.
        """
        age_s = self._age.age_s(time.monotonic())
        lost = self._replica is not None and not self._primary.answers()
        usable = self.has_replica(age_max_s)
        first = usable and (lost or age_s <= self._settings.replica_lag_max_s)
        if first and (found := self._from_replica(query)) is not None:
            if counts(found[0]):
                return found[0], age_s
            if lost:
                raise UnavailableError("no primary database answers to confirm this")
        try:
            with self._primary.database.transaction() as session:
                return query(session), 0.0
        except SQLAlchemyError as error:
            if usable and not first and (found := self._from_replica(query)) is not None and counts(found[0]):
                return found[0], age_s
            if self._replica is not None and self._replica.answers() and not usable:
                raise UnavailableError(
                    f"no primary database answers to confirm this, and the region's copy may be {age_s:.0f} s old;"
                    f" {age_max_s:.0f} s are allowed"
                ) from error
            raise

    def has_replica(self, age_max_s: float) -> bool:
        """Whether there is a standby that answers and is at most this old."""
        answers = self._replica is not None and self._replica.answers()
        return answers and self._age.age_s(time.monotonic()) <= age_max_s

    def replica_age_s(self) -> float | None:
        """How old the standby's copy may be; None: there is no standby, or it does not answer, or nothing is known."""
        age_s = self._age.age_s(time.monotonic())
        return age_s if self.has_replica(math.inf) and math.isfinite(age_s) else None

    def replica_state(self) -> ReplicaState:
        """Whether the standby is read first, and why not."""
        if self._replica is None:
            return ReplicaState.NONE
        if not self._replica.answers():
            return ReplicaState.AWAY
        in_step = self.has_replica(self._settings.replica_lag_max_s)
        return ReplicaState.IN_STEP if in_step else ReplicaState.BEHIND

    def _from_replica(self, query: Callable[[Session], Found]) -> tuple[Found] | None:
        """What the standby finds; None: it does not answer."""
        assert self._replica is not None
        try:
            with self._replica.database.transaction() as session:
                return (query(session),)
        except SQLAlchemyError as error:
            log.warning("the region's copy of the database was not read", error=str(error).splitlines()[0])
            return None


def _of_replica(settings: Settings, url: SecretStr) -> Settings:
    """The settings of connections to the standby. One that needs longer for an answer than it may lag is of no use."""
    limit_s = min(settings.database_timeout_s, math.ceil(settings.replica_lag_max_s))
    return settings.model_copy(update={"database_url": url, "database_timeout_s": limit_s})


async def _repeat(look: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        await look()
