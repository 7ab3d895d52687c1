"""Stored responses as a gateway reads and writes them while it answers: in threads of their own, since each may wait
for a Postgres that hangs.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import anyio
import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.settings import Settings
from controlplane.store.responses import StoredResponse, add_response, conversation_before, end_response, note_running
from controlplane.store.session import Database

log = structlog.get_logger()
_THREADS = 8
_END_RETRY_S = 2.0


class StoredResponses:
    """The stored responses of all tenants; one for a gateway."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def items_before(self, previous_id: str | None, *, tenant: str) -> list[dict[str, Any]]:
        """The items of the conversation that a response continues, the oldest first; none without a previous one.

        Raises:
            InvalidValueError: as `conversation_before`.
            SQLAlchemyError: Postgres does not answer.
        """
        if previous_id is None:
            return []
        return await anyio.to_thread.run_sync(self._read, previous_id, tenant, limiter=self._threads)

    async def keep(self, stored: StoredResponse, *, tenant: str) -> bool:
        """Store a response; returns whether that was possible. An answer is not lost because it could not be stored."""
        try:
            await anyio.to_thread.run_sync(self._write, stored, tenant, limiter=self._threads)
        except SQLAlchemyError as error:
            log.warning("a response is not stored", id=stored.response["id"], error=str(error).splitlines()[0])
            return False
        return True

    async def note_running(self, response_ids: Sequence[str]) -> Collection[str]:
        """Note that responses are in progress; returns those that still are, as far as is known."""
        if not response_ids:
            return ()
        try:
            return await anyio.to_thread.run_sync(self._note_running, response_ids, limiter=self._threads)
        except SQLAlchemyError:
            return response_ids

    async def end(self, response: dict[str, Any], *, attempts_max: int = 30) -> None:
        """Write down how a response in the background ended, unless it was cancelled. While Postgres is away this is
        tried again; a response whose end was never written is found to have failed.
        """
        for attempt in range(attempts_max):
            try:
                await anyio.to_thread.run_sync(self._end, response, limiter=self._threads)
            except SQLAlchemyError as error:
                log.warning("how a response ended is not stored", id=response["id"], error=str(error).splitlines()[0])
                if attempt + 1 < attempts_max:
                    await asyncio.sleep(_END_RETRY_S)
            else:
                return

    def read_before(
        self, session: Session, previous_id: str, *, tenant: str, whole: bool = True
    ) -> list[dict[str, Any]]:
        """The items of the conversation up to this response, the oldest first; `whole` as in `conversation_before`.

        Raises:
            InvalidValueError: as `conversation_before`.
        """
        before = conversation_before(
            session,
            previous_id,
            tenant=tenant,
            count_max=self._settings.conversation_responses_max,
            bytes_max=self._settings.conversation_bytes_max,
            whole=whole,
        )
        return [item for each in before for item in each.items]

    def _read(self, previous_id: str, tenant: str) -> list[dict[str, Any]]:
        with self._database.transaction() as session:
            return self.read_before(session, previous_id, tenant=tenant)

    def _note_running(self, response_ids: Sequence[str]) -> Collection[str]:
        with self._database.transaction() as session:
            return note_running(session, response_ids)

    def _end(self, response: dict[str, Any]) -> None:
        with self._database.transaction() as session:
            end_response(session, response)

    def _write(self, stored: StoredResponse, tenant: str) -> None:
        with self._database.transaction() as session:
            add_response(session, stored, tenant=tenant)
