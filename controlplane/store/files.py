"""Rows of the Files API. A file belongs to a tenant; nobody else sees it."""

from collections.abc import Collection
from datetime import timedelta
from typing import TypeVar

import uuid_utils
from sqlalchemy import ARRAY, ColumnElement, String, any_, func, insert, literal, or_, select, update
from sqlalchemy.orm import Session

from controlplane.errors import NotFoundError
from controlplane.store.batch_tables import File
from controlplane.store.rows import Page, page

_THERE = (File.deleted_at.is_(None), or_(File.expires_at.is_(None), File.expires_at > func.now()))
Found = TypeVar("Found")


def new_file_id() -> str:
    """A file id; ids sort by creation."""
    return f"file-{uuid_utils.uuid7().hex}"


def add_file(
    session: Session, *, file_id: str, tenant: str, filename: str, purpose: str, size_bytes: int, keep: timedelta
) -> File:
    """Write down a file whose bytes are stored, and that they are kept for so long, by Postgres's clock."""
    added = insert(File).values(
        id=file_id,
        tenant=tenant,
        filename=filename,
        purpose=purpose,
        bytes=size_bytes,
        expires_at=func.now() + keep,
    )
    return session.scalars(added.returning(File)).one()


def is_there(file_id: str, tenant: str) -> tuple[ColumnElement[bool], ...]:
    """Conditions that a file is that tenant's, and is neither deleted nor past its time."""
    return File.id == file_id, File.tenant == tenant, *_THERE


def get_file(session: Session, file_id: str, *, tenant: str) -> File:
    """A tenant's file.

    Raises:
        NotFoundError: there is none of that id, it is another tenant's, deleted, or past its time.
    """
    row = session.scalar(select(File).where(*is_there(file_id, tenant)))
    return _found(row, file_id)


def list_files(
    session: Session, *, tenant: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
) -> Page[File]:
    """One page of a tenant's files."""
    query = select(File).where(File.tenant == tenant, *_THERE)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    return page(session, query, after=after, limit=limit, newest_first=newest_first)


def delete_file(session: Session, file_id: str, *, tenant: str) -> None:
    """Mark a tenant's file as deleted. Its bytes go after the commit.

    Raises:
        NotFoundError: as `get_file`.
    """
    deleted = update(File).where(*is_there(file_id, tenant)).values(deleted_at=func.now())
    _found(session.scalar(deleted.returning(File.id)), file_id)


def _found(row: Found | None, file_id: str) -> Found:
    if row is None:
        raise NotFoundError(f"No such File object: {file_id}", param="file_id")
    return row


def known_files(session: Session, file_ids: Collection[str]) -> set[str]:
    """Which of these ids, however many, have a row that is not deleted."""
    asked = any_(literal(list(file_ids), ARRAY(String)))
    return set(session.scalars(select(File.id).where(File.id == asked, File.deleted_at.is_(None))))


def expire_files(session: Session) -> list[str]:
    """Mark files past their time as deleted; returns their ids."""
    rows = session.scalars(
        select(File).where(File.expires_at < func.now(), File.deleted_at.is_(None)).limit(1000)
    ).all()
    now = session.scalar(select(func.now()))
    for row in rows:
        row.deleted_at = now
    return [row.id for row in rows]
