"""The request log of a process: what ended waits in memory for a second, then it is a row, and a line of the log.

Requests never wait for it. While Postgres is away, or more ends than can be written, records are dropped and counted.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import islice

import anyio
import anyio.to_thread
import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.serving.background import repeating
from controlplane.settings import Settings
from controlplane.store.request_log import OK, RequestRecord, write_requests
from controlplane.store.session import Database

log = structlog.get_logger()
_WRITE_EVERY_S = 1.0
_PIECE = 1000
_SERVER_ERRORS = 500


class RequestLog:
    """Takes the records of one process. `on_drop` hears how many were dropped."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        on_drop: Callable[[int], object],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._settings = settings
        self._on_drop = on_drop
        self._chance = chance
        self._ended: deque[RequestRecord] = deque()
        self._unwritten: deque[RequestRecord] = deque()
        self._writing = threading.Lock()
        self._threads = anyio.CapacityLimiter(1)
        self._is_away = False

    def add(self, record: RequestRecord) -> None:
        """Note a request that has ended, if the settings want it."""
        if not self._is_kept(record):
            return
        if len(self._ended) < self._settings.request_log_waiting_max:
            self._ended.append(record)
        else:
            self._on_drop(1)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Write every second while the block runs, and once at its end."""
        return repeating(self._write, _WRITE_EVERY_S)

    def write(self) -> None:
        """Write what has ended: lines first, then rows, in pieces of a thousand.

        Raises:
            SQLAlchemyError: Postgres is away; rows wait for the next time.
        """
        with self._writing:
            while self._ended:
                record = self._ended.popleft()
                self._say(record)
                self._unwritten.append(record)
            self._drop_oldest()
            while self._unwritten:
                piece = list(islice(self._unwritten, _PIECE))
                with self._database.transaction() as session:
                    write_requests(session, piece)
                for _ in piece:
                    self._unwritten.popleft()

    def _is_kept(self, record: RequestRecord) -> bool:
        """What failed or was slow always is, unless nothing is; the rest by chance."""
        if self._is_notable(record):
            return self._settings.request_log != "off"
        sample = self._settings.request_log_sample
        return self._settings.request_log == "all" and (sample >= 1 or self._chance() < sample)

    def _is_notable(self, record: RequestRecord) -> bool:
        waited_s = record.duration_s if record.first_token_s is None else record.first_token_s
        return record.outcome != OK or waited_s >= self._settings.request_log_slow_s

    def _say(self, record: RequestRecord) -> None:
        """Write the line of a record that has one."""
        lines = self._settings.request_log_lines
        if lines == "off" or (lines == "errors" and not self._is_notable(record)):
            return
        fields = {name: value for name, value in msgspec.structs.asdict(record).items() if value not in (None, [])}
        fields["ended_at"] = record.ended_at.isoformat()
        say = log.warning if record.status >= _SERVER_ERRORS else log.info
        say("request", **fields)

    def _drop_oldest(self) -> None:
        excess = len(self._unwritten) - self._settings.request_log_waiting_max
        for _ in range(excess):
            self._unwritten.popleft()
        if excess > 0:
            self._on_drop(excess)

    async def _write(self) -> None:
        try:
            await anyio.to_thread.run_sync(self.write, limiter=self._threads)
        except SQLAlchemyError as error:
            if not self._is_away:
                log.warning("the request log waits for Postgres", error=str(error).splitlines()[0])
            self._is_away = True
            return
        if self._is_away:
            log.info("the request log is written again")
        self._is_away = False
