"""The request log of a process: records of ended requests are written every second, as rows and as lines of the log.

Requests never wait for it. While Postgres is unavailable or too slow, records are dropped and counted.
"""

import random
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import islice

import msgspec
import structlog

from controlplane.serving.background import flushing
from controlplane.settings import Settings
from controlplane.store.request_log import OK, RequestRecord, write_requests
from controlplane.store.session import Database

log = structlog.get_logger()
_WRITE_EVERY_S = 1.0
_PIECE = 1000
_SERVER_ERRORS = 500


class RequestLog:
    """The records of one process. `on_drop` is called with the number of records dropped."""

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
        self._gateway = f"{socket.gethostname()}:{settings.port}"
        self._ended: deque[RequestRecord] = deque()
        self._unwritten: deque[RequestRecord] = deque()
        self._writing = threading.Lock()

    def add(self, record: RequestRecord) -> None:
        """Keep the record of an ended request, if the settings ask for it."""
        if not self._is_kept(record):
            return
        record.gateway = self._gateway
        if len(self._ended) < self._settings.request_log_waiting_max:
            self._ended.append(record)
        else:
            self._on_drop(1)

    def running(self) -> AbstractAsyncContextManager[None]:
        return flushing(self.write, _WRITE_EVERY_S, "request log")

    def write(self) -> None:
        """Write what has ended: lines first, then rows, a thousand in each transaction.

        Raises:
            SQLAlchemyError: Postgres is unavailable; the rows are kept.
        """
        with self._writing:
            while self._ended:
                record = self._ended.popleft()
                self._log_line(record)
                self._unwritten.append(record)
            self._drop_oldest()
            while self._unwritten:
                piece = list(islice(self._unwritten, _PIECE))
                with self._database.transaction() as session:
                    write_requests(session, piece)
                for _ in piece:
                    self._unwritten.popleft()

    def _is_kept(self, record: RequestRecord) -> bool:
        """Failed and slow requests are always kept unless the log is off, a sample of the others."""
        if self._is_notable(record):
            return self._settings.request_log != "off"
        sample = self._settings.request_log_sample
        return self._settings.request_log == "all" and (sample >= 1 or self._chance() < sample)

    def _is_notable(self, record: RequestRecord) -> bool:
        waited_s = record.duration_s if record.first_token_s is None else record.first_token_s
        return record.outcome != OK or waited_s >= self._settings.request_log_slow_s

    def _log_line(self, record: RequestRecord) -> None:
        lines = self._settings.request_log_lines
        if lines == "off" or (lines == "errors" and not self._is_notable(record)):
            return
        fields = {name: value for name, value in msgspec.structs.asdict(record).items() if value not in (None, [])}
        fields["ended_at"] = record.ended_at.isoformat()
        write = log.warning if record.status >= _SERVER_ERRORS else log.info
        write("request", **fields)

    def _drop_oldest(self) -> None:
        excess = len(self._unwritten) - self._settings.request_log_waiting_max
        for _ in range(excess):
            self._unwritten.popleft()
        if excess > 0:
            self._on_drop(excess)
