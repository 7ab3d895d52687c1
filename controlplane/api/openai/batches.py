"""The Batch API: create, list, retrieve and cancel. A dispatcher validates and runs the batches."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from controlplane.api.auth import Client
from controlplane.api.openai.files import KEEP_MAX_S, KEEP_MIN_S, listing
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import SessionDep, StatementDep
from controlplane.bodies import ClientBody
from controlplane.errors import InvalidValueError
from controlplane.policies.lifecycle import BatchState
from controlplane.serving.endpoints import BATCH_ENDPOINTS
from controlplane.serving.openai_fields import Metadata
from controlplane.store import batches
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import BatchCounts

router = APIRouter(prefix="/v1/batches", tags=["batches"], responses=ERRORS)
_WINDOW_HOURS_MAX = 168


def _batch_endpoint(path: str) -> str:
    if path not in BATCH_ENDPOINTS:
        raise ValueError(f"one of {', '.join(BATCH_ENDPOINTS)}")
    return path


class OutputExpiry(BaseModel):
    """How long the output files of a batch are kept, from the moment that they are written."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: int = Field(ge=KEEP_MIN_S, le=KEEP_MAX_S)


class NewBatch(ClientBody):
    """What a batch is made of."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"input_file_id": "file-0192", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        },
    )
    input_file_id: str = Field(max_length=64)
    endpoint: Annotated[str, AfterValidator(_batch_endpoint), Field(json_schema_extra={"enum": list(BATCH_ENDPOINTS)})]
    completion_window: Annotated[str, Field(pattern="^[1-9][0-9]{0,4}[hm]$")]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None

    def window_s(self) -> int:
        """The completion window in seconds; OpenAI's is always 24 h, ours may be 1 minute to 168 h."""
        window_s = int(self.completion_window[:-1]) * (3600 if self.completion_window.endswith("h") else 60)
        if window_s > _WINDOW_HOURS_MAX * 3600:
            message = f"at most {_WINDOW_HOURS_MAX}h, not {self.completion_window}"
            raise InvalidValueError(message, param="completion_window")
        return window_s


@router.post("", summary="Create a batch")
def create(body: NewBatch, session: StatementDep, caller: Client) -> dict[str, Any]:
    """Accepts a batch; it is `validating` until every line was checked, and then runs whole or fails whole."""
    batch = batches.add_batch(
        session,
        tenant=caller.tenant,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        window_s=body.window_s(),
        labels=dict(body.metadata) if body.metadata else None,
        output_keep_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
        models=None if caller.models is None else sorted(caller.models),
    )
    return _batch(batch, BatchCounts())


@router.get("", summary="List batches")
def list_batches(
    session: StatementDep, caller: Client, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """The newest first, each with its counts right now."""
    page = batches.list_batches(session, tenant=caller.tenant, after=after, limit=limit)
    counts = batches.counts_of(session, page.rows)
    return listing([_batch(batch, counts[batch.id]) for batch in page.rows], has_more=page.has_more)


@router.get("/{batch_id}", summary="Retrieve a batch")
def get_batch(batch_id: str, session: StatementDep, caller: Client) -> dict[str, Any]:
    """Its state, its counts right now and, while it is in progress, when it will end (`tidepool`)."""
    batch = batches.get_batch(session, batch_id, tenant=caller.tenant)
    return _batch(batch, batches.counts_of(session, [batch])[batch.id])


@router.post("/{batch_id}/cancel", summary="Cancel a batch")
def cancel(batch_id: str, session: SessionDep, caller: Client) -> dict[str, Any]:
    """What waits never runs; finished lines are kept and can be fetched."""
    batch = batches.cancel_batch(session, batch_id, tenant=caller.tenant)
    return _batch(batch, batches.counts_of(session, [batch])[batch.id])


def _batch(batch: Batch, counts: BatchCounts) -> dict[str, Any]:
    state = BatchState(batch.state)
    ended = {
        f"{name}_at": _seconds(batch.ended_at) if state == name else None
        for name in (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": batch.errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.state,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.deadline_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "cancelling_at": _seconds(batch.cancelling_at),
        **ended,
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "input_tokens": counts.input_tokens,
            "output_tokens": counts.output_tokens,
            "total_tokens": counts.input_tokens + counts.output_tokens,
        },
        "metadata": batch.labels,
        "tidepool": _prediction(batch) if state == BatchState.IN_PROGRESS else None,
    }


def _prediction(batch: Batch) -> dict[str, Any]:
    """When it will end, as far as is known, and why then. OpenAI's object has no such field."""
    return {
        "predicted_end_at": _seconds(batch.predicted_end_at),
        "at_risk": batch.at_risk,
        "reason": batch.end_reason,
    }


def _seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())
