"""The Files API: upload, list, retrieve, download and delete. Files belong to the key's tenant."""

import contextlib
from datetime import timedelta
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from fastapi import APIRouter, File, Form, Query, UploadFile
from fastapi.responses import StreamingResponse

from controlplane.api.auth import Client
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import State, StateDep, StatementDep
from controlplane.errors import InvalidValueError, TooLargeError, UnavailableError
from controlplane.store import files
from controlplane.store.batch_tables import File as FileRow

router = APIRouter(
    prefix="/v1/files",
    tags=["files"],
    responses=ERRORS,
    form_limits={"max_files": 1, "max_fields": 16, "max_part_size": 1024},  # fields are kept in memory, the file is not
)
_DISK_RESERVE_BYTES = 256 * 2**20
KEEP_MIN_S, KEEP_MAX_S = 3600, 30 * 86_400
Keep = Annotated[int | None, Form(alias="expires_after[seconds]", ge=KEEP_MIN_S, le=KEEP_MAX_S)]


@router.post("", summary="Upload a file")
def upload(
    state: StateDep,
    session: StatementDep,
    caller: Client,
    file: Annotated[UploadFile, File(description="JSON lines, one request each")],
    purpose: Annotated[Literal["batch"], Form()],
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    keep_s: Keep = None,
) -> dict[str, Any]:
    """Every line must be a JSON object; the first that is not is named, and nothing is kept."""
    if (anchor is None) != (keep_s is None):
        raise InvalidValueError("expires_after needs both anchor and seconds", param="expires_after")
    file_id = files.new_file_id()
    size_bytes = _store(state, file_id, file.file)
    kept = timedelta(seconds=keep_s) if keep_s is not None else timedelta(days=state.settings.file_keep_days)
    row = files.add_file(
        session,
        file_id=file_id,
        tenant=caller.tenant,
        filename=(file.filename or "batch.jsonl")[:255],
        purpose=purpose,
        size_bytes=size_bytes,
        keep=kept,
    )
    return _file(row)


@router.get("", summary="List files")
def list_files(
    session: StatementDep,
    caller: Client,
    purpose: Literal["batch", "batch_output"] | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The newest first, a hundred at most on a page."""
    page = files.list_files(
        session, tenant=caller.tenant, purpose=purpose, after=after, limit=min(limit, 100), newest_first=order == "desc"
    )
    return listing([_file(row) for row in page.rows], has_more=page.has_more)


@router.get("/{file_id}", summary="Retrieve a file's description")
def get_file(file_id: str, session: StatementDep, caller: Client) -> dict[str, Any]:
    """Size, purpose and times of a file."""
    return _file(files.get_file(session, file_id, tenant=caller.tenant))


@router.delete("/{file_id}", summary="Delete a file")
def delete_file(file_id: str, state: StateDep, caller: Client) -> dict[str, Any]:
    """Its bytes go at once, or with the next sweep; batches that were validated keep their requests."""
    with state.database.statement() as session:
        files.delete_file(session, file_id, tenant=caller.tenant)
    with contextlib.suppress(UnavailableError):
        state.blobs.delete(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/{file_id}/content", summary="Fetch a file's content", response_class=StreamingResponse)
def content(file_id: str, state: StateDep, caller: Client) -> StreamingResponse:
    """The bytes, streamed."""
    with state.database.statement() as session:
        row = files.get_file(session, file_id, tenant=caller.tenant)
    stream = state.blobs.open(file_id)
    headers = {"Content-Length": str(row.bytes), "Content-Disposition": "attachment"}
    return StreamingResponse(state.blobs.chunks(stream), media_type="application/jsonl", headers=headers)


def listing(rows: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": has_more}


def _store(state: State, file_id: str, source: BinaryIO) -> int:
    """Store an upload while checking its lines; returns its size in bytes."""
    settings = state.settings
    if state.blobs.free_bytes() < settings.file_bytes_max + _DISK_RESERVE_BYTES:
        raise UnavailableError("the disk for files is nearly full", retry_after_s=60, retry_helps=False)
    size_bytes = requests = 0
    line_bytes_max = settings.request_body_bytes_max
    lines_max = 2 * settings.batch_lines_max  # those of a batch, and empty ones between them
    with state.blobs.writing(file_id) as target:
        for number, line in enumerate(iter(lambda: source.readline(line_bytes_max + 2), b""), start=1):
            size_bytes += len(line)
            if size_bytes > settings.file_bytes_max:
                raise TooLargeError(f"the file is over the limit of {settings.file_bytes_max} bytes", param="file")
            if number > lines_max:
                raise InvalidValueError(f"the file is over the limit of {lines_max} lines", param="file")
            if len(line.rstrip(b"\r\n")) > line_bytes_max:
                raise InvalidValueError(f"line {number} is over the limit of {line_bytes_max} bytes", param="file")
            requests += _check_line(line, number)
            target.write(line)
        if requests == 0:
            raise InvalidValueError("the file has no line", param="file")
    return size_bytes


def _check_line(line: bytes, number: int) -> int:
    """1 for a JSON object, 0 for an empty line."""
    if not line.strip():
        return 0
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"line {number} is not valid JSON: {error}", param="file") from error
    if not isinstance(value, dict):
        raise InvalidValueError(f"line {number} is not a JSON object", param="file")
    return 1


def _file(row: FileRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": int(row.created_at.timestamp()),
        "expires_at": None if row.expires_at is None else int(row.expires_at.timestamp()),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
    }
