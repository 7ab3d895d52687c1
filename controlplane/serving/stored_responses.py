"""Stored responses as a gateway reads and writes them while it answers: in threads of their own, since each may wait
for a Postgres that hangs.
"""

from typing import Any

import anyio
import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.settings import Settings
from controlplane.store.responses import StoredResponse, add_response, conversation_before
from controlplane.store.session import Database

log = structlog.get_logger()
_THREADS = 8


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

    def read_before(self, session: Session, previous_id: str, *, tenant: str) -> list[dict[str, Any]]:
        """The items of the conversation up to this response, the oldest first.

        Raises:
            InvalidValueError: as `conversation_before`.
        """
        before = conversation_before(
            session,
            previous_id,
            tenant=tenant,
            count_max=self._settings.conversation_responses_max,
            bytes_max=self._settings.conversation_bytes_max,
        )
        return [item for each in before for item in each.items]

    def _read(self, previous_id: str, tenant: str) -> list[dict[str, Any]]:
        with self._database.transaction() as session:
            return self.read_before(session, previous_id, tenant=tenant)

    def _write(self, stored: StoredResponse, tenant: str) -> None:
        with self._database.transaction() as session:
            add_response(session, stored, tenant=tenant)
