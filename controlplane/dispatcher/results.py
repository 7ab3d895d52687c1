"""Writing results: those that arrive during a transaction are written together by the next one. Those that cannot be
written yet go behind the others.
"""

import asyncio

import anyio.to_thread
import structlog
from sqlalchemy.exc import DataError, SQLAlchemyError

from controlplane.store import queue
from controlplane.store.queue import Outcome
from controlplane.store.session import Database

log = structlog.get_logger()
_TOGETHER_MAX = 512
_TOGETHER_MORE = 16
"""By how many results a group may be larger after one that was written; after one that was not it is half as large, for
perhaps it takes longer than a statement may.
"""
_RETRY_S = 1.0


class ResultWriter:
    """Writes outcomes for a dispatcher."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Outcome, asyncio.Future[bool]]] = []
        self._work: asyncio.Task[None] | None = None
        self._together = _TOGETHER_MAX

    async def write(self, outcome: Outcome) -> bool:
        """Whether the result was written; False: the claim is no longer the newest. While Postgres is unavailable, the
        result waits; the loss of its lease cancels it.

        Raises:
            sqlalchemy.exc.DataError: Postgres refuses this result.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((outcome, done))
        if self._work is None:
            self._work = asyncio.create_task(self._write_waiting())
        return await done

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = [each for each in self._waiting if not each[1].done()]
                group, self._waiting = self._waiting[: self._together], self._waiting[self._together :]
                await self._write_group(group)
        finally:
            self._work = None

    async def _write_group(self, group: list[tuple[Outcome, "asyncio.Future[bool]"]]) -> None:
        """Write a group, or put it back."""
        if not group:
            return
        try:
            written = await anyio.to_thread.run_sync(self._commit, [outcome for outcome, _ in group])
        except DataError as error:
            if len(group) == 1:
                _settle(group[0][1], error)
                return
            self._waiting = group + self._waiting  # one of them is at fault: retry it alone
            self._together = 1
            return
        except SQLAlchemyError as error:
            log.warning("results wait for Postgres", results=len(group), error=str(error).splitlines()[0])
            self._waiting += group
            self._together = max(1, len(group) // 2)
            await asyncio.sleep(_RETRY_S)
            return
        except BaseException as error:
            for _, done in group:
                _settle(done, error)
            raise
        for outcome, done in group:
            if outcome.claim.key in written:
                _settle(done, written[outcome.claim.key])
            else:
                self._waiting.append((outcome, done))
        self._together = min(_TOGETHER_MAX, self._together + _TOGETHER_MORE)
        if not written:
            await asyncio.sleep(_RETRY_S)  # their batches are being ended

    def _commit(self, outcomes: list[Outcome]) -> dict[tuple[int, int], bool]:
        with self._database.statement() as session:
            return queue.finish(session, outcomes)


def _settle(done: "asyncio.Future[bool]", value: bool | BaseException) -> None:
    if done.done():  # its task was cancelled
        return
    if isinstance(value, BaseException):
        done.set_exception(value)
    else:
        done.set_result(value)
