"""Stored responses of the Responses API. A response belongs to a tenant; nobody else sees it.

A conversation is a chain of responses, each with its own input and output and the id of the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import ARRAY, Index, LargeBinary, String, any_, func, literal, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.errors import InvalidValueError, NotFoundError, PreviousResponseError
from controlplane.store.tables import Base, one_of


class ResponseState(StrEnum):
    """Where a response is."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ResponseRow(Base):
    """`response`, `input`: the object and its input items as JSON, which Postgres's own types of JSON could not hold
    where a text has U+0000. `bytes`: of both. `heard_at`: when the gateway that runs it in the background last wrote.
    """

    __tablename__ = "responses"
    __table_args__ = (one_of("state", ResponseState), Index(None, "created_at"))
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    previous_id: Mapped[str | None]
    state: Mapped[str]
    response: Mapped[bytes] = mapped_column(LargeBinary)
    input: Mapped[bytes] = mapped_column(LargeBinary)
    bytes: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heard_at: Mapped[datetime] = mapped_column(server_default=func.now())


SILENT_S = 60.0
"""A gateway that runs a response in the background writes more often than this."""
_RUNNING = ResponseRow.state == ResponseState.IN_PROGRESS


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response and the items of its own input."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        """What it adds to its conversation: its input and its output."""
        output: list[dict[str, Any]] = self.response["output"]
        return [*self.input, *output]


def add_response(session: Session, stored: StoredResponse, *, tenant: str) -> None:
    """Store a response of a tenant."""
    response, items = msgspec.json.encode(stored.response), msgspec.json.encode(stored.input)
    row = ResponseRow(
        id=stored.response["id"],
        tenant=tenant,
        previous_id=stored.response["previous_response_id"],
        state=stored.response["status"],
        response=response,
        input=items,
        bytes=len(response) + len(items),
    )
    session.add(row)
    session.flush()


def get_response(session: Session, response_id: str, *, tenant: str) -> StoredResponse:
    """A tenant's response. One in progress has failed if its gateway has been silent for too long.

    Raises:
        NotFoundError: there is none of that id, or it is another tenant's.
    """
    row = _row(session, response_id, tenant)
    stored = _decoded(row)
    silent = func.now() - ResponseRow.heard_at > timedelta(seconds=SILENT_S)
    if row.state == ResponseState.IN_PROGRESS and session.scalar(select(silent).where(ResponseRow.id == response_id)):
        lost = {"code": "server_error", "message": "the gateway that ran this response is gone"}
        return replace(stored, response={**stored.response, "status": ResponseState.FAILED.value, "error": lost})
    return stored


def note_running(session: Session, response_ids: Sequence[str]) -> set[str]:
    """Note that responses are in progress; returns those that were neither cancelled nor deleted."""
    named = ResponseRow.id == any_(literal(list(response_ids), ARRAY(String)))
    running = update(ResponseRow).where(named, _RUNNING).values(heard_at=func.now()).returning(ResponseRow.id)
    return set(session.scalars(running))


def end_response(session: Session, response: dict[str, Any]) -> bool:
    """Write down how a response in progress ended; returns false if it was cancelled or deleted before."""
    ended = (
        update(ResponseRow)
        .where(ResponseRow.id == response["id"], _RUNNING)
        .values(
            _values(response) | {"bytes": len(msgspec.json.encode(response)) + func.octet_length(ResponseRow.input)}
        )
    )
    return session.scalar(ended.returning(ResponseRow.id)) is not None


def cancel_response(session: Session, response_id: str, *, tenant: str) -> dict[str, Any]:
    """Cancel a response in the background; returns it as it is then. One that has ended stays as it is.

    Raises:
        NotFoundError: as `get_response`.
        InvalidValueError: it does not run in the background.
    """
    row = _row(session, response_id, tenant, lock=True)
    response = _decoded(row).response
    if not response["background"]:
        raise InvalidValueError("only a response in the background can be cancelled", param="response_id")
    if row.state == ResponseState.IN_PROGRESS:
        response["status"] = ResponseState.CANCELLED.value
        session.execute(update(ResponseRow).where(ResponseRow.id == response_id).values(_values(response)))
    return response


def delete_response(session: Session, response_id: str, *, tenant: str) -> None:
    """Delete a tenant's response. Those that follow it stay, but cannot be continued.

    Raises:
        NotFoundError: as `get_response`.
    """
    session.delete(_row(session, response_id, tenant))


def conversation_before(
    session: Session, response_id: str, *, tenant: str, count_max: int, bytes_max: int, whole: bool = True
) -> list[StoredResponse]:
    """The responses of a conversation, the oldest first, up to and with this one. Not `whole`: those that follow the
    last one that is not there.

    Raises:
        PreviousResponseError: the response, or one before it, is not there, as in `get_response`. Only if `whole`.
        InvalidValueError: the conversation has more responses or bytes than these, or the response is in progress.
    """
    chain = _chain(session, response_id, tenant, count_max + 1)
    if len(chain) > count_max or sum(size for _, _, size in chain) > bytes_max:
        raise InvalidValueError(
            f"previous_response_id: a conversation may have {count_max} responses and {bytes_max} bytes;"
            f" begin a new one with what matters of it",
            param="previous_response_id",
        )
    if whole and (not chain or chain[-1][1] is not None):
        missing = chain[-1][1] if chain else response_id
        raise PreviousResponseError(f"Previous response with id '{missing}' not found.", param="previous_response_id")
    rows = session.scalars(select(ResponseRow).where(ResponseRow.id.in_([each for each, _, _ in chain])))
    found = {row.id: _decoded(row) for row in rows}
    if chain and found[response_id].response["status"] == ResponseState.IN_PROGRESS:
        raise InvalidValueError(
            f"previous_response_id: response '{response_id}' is still in progress", param="previous_response_id"
        )
    return [found[each] for each, _, _ in reversed(chain)]


def _chain(session: Session, response_id: str, tenant: str, count_max: int) -> Sequence[Any]:
    """Id, previous id and bytes of a response and of those before it, the newest first."""
    columns = (ResponseRow.id, ResponseRow.previous_id, ResponseRow.bytes)
    newest = select(*columns, literal(1).label("depth")).where(
        ResponseRow.id == response_id, ResponseRow.tenant == tenant
    )
    chain = newest.cte("chain", recursive=True)
    before = (
        select(*columns, (chain.c.depth + 1).label("depth"))
        .join(chain, ResponseRow.id == chain.c.previous_id)
        .where(ResponseRow.tenant == tenant, chain.c.depth < count_max)
    )
    chain = chain.union_all(before)
    return session.execute(select(chain.c.id, chain.c.previous_id, chain.c.bytes).order_by(chain.c.depth)).all()


def _values(response: dict[str, Any]) -> dict[str, Any]:
    return {"state": response["status"], "response": msgspec.json.encode(response)}


def _row(session: Session, response_id: str, tenant: str, *, lock: bool = False) -> ResponseRow:
    query = select(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant == tenant)
    row = session.scalar(query.with_for_update() if lock else query)
    if row is None:
        raise NotFoundError(f"Response with id '{response_id}' not found.", param="response_id")
    return row


def _decoded(row: ResponseRow) -> StoredResponse:
    return StoredResponse(response=msgspec.json.decode(row.response), input=msgspec.json.decode(row.input))
