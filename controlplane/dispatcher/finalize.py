"""Ending a batch: its results become an output file and an error file, and its state becomes terminal."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy.orm import Session

from controlplane.dispatcher.steps import Step
from controlplane.policies.lifecycle import BatchRequestState, BatchState
from controlplane.settings import Settings
from controlplane.store.batch_attempts import Due
from controlplane.store.batch_tables import Batch, BatchResult
from controlplane.store.batches import forget_requests, models_of, move_batch, result_lines
from controlplane.store.blobs.base import BlobStore
from controlplane.store.files import add_file, new_file_id
from controlplane.store.usage import Usage, UsageKey, add_batch_usage
from dataplane.protocol.tiers import Tier

_UNKNOWN_MODEL = "unknown"
"""The model of failed requests of a batch that asks for several models."""


class _Written(NamedTuple):
    """What was written of a batch: its files, what its requests used, in all and by model, and whether one expired."""

    output_id: str | None
    error_id: str | None
    total: Usage
    usage: Mapping[str, Usage]
    expired: bool


def finalize(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> Callable[[], None]:
    """Advance a batch whose requests have all ended. The first step only sets the state `finalizing`, the second writes
    the files and deletes the batch's rows, so a crash between them loses nothing. Returns how the step ends.
    """
    if batch.state == BatchState.IN_PROGRESS:
        return partial(move_batch, session, batch, BatchState.FINALIZING)
    written = _write_files(session, batch, blobs, settings)
    forget_requests(session, batch)
    hour = datetime.fromtimestamp(time.time(), UTC).replace(minute=0, second=0, microsecond=0)
    tier = Tier.NIW.value
    add_batch_usage(session, {UsageKey(hour, batch.tenant, name, tier): count for name, count in written.usage.items()})
    return partial(_end, session, batch, written)


FINALIZE = Step(Due.END, finalize)


def _end(session: Session, batch: Batch, written: _Written) -> None:
    """Give the batch its files, its final counts and its last state."""
    total = written.total
    batch.output_file_id, batch.error_file_id = written.output_id, written.error_id
    batch.completed, batch.failed = total.requests - total.failed, total.failed
    batch.input_tokens, batch.output_tokens = total.input_tokens, total.output_tokens
    if batch.state == BatchState.CANCELLING:
        move_batch(session, batch, BatchState.CANCELLED)
    else:
        move_batch(session, batch, BatchState.EXPIRED if written.expired else BatchState.COMPLETED)


def _write_files(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> _Written:
    output_id, error_id = new_file_id(), new_file_id()
    output_bytes = error_bytes = 0
    expired = False
    total, usage = Usage(), defaultdict[str, Usage](Usage)
    models = models_of(session, batch)
    with blobs.writing(output_id) as output, blobs.writing(error_id) as errors:
        for custom_id, result in result_lines(session, batch):
            expired |= result.state == BatchRequestState.EXPIRED
            failed = result.state != BatchRequestState.COMPLETED
            for count in (total, usage[_model_of(result, models)]):
                count.add(failed=failed, input_tokens=result.input_tokens, output_tokens=result.output_tokens)
            line = msgspec.json.encode(_line(batch, custom_id, result)) + b"\n"
            if failed:
                error_bytes += errors.write(line)
            else:
                output_bytes += output.write(line)
        if total.requests != batch.total:
            raise RuntimeError(f"batch {batch.id} has {total.requests} results for {batch.total} lines")
    return _Written(
        output_id=_keep(session, batch, blobs, settings, output_id, output_bytes, "output"),
        error_id=_keep(session, batch, blobs, settings, error_id, error_bytes, "error"),
        total=total,
        usage=usage,
        expired=expired,
    )


def _model_of(result: BatchResult, models: Sequence[str]) -> str:
    """The model that a request asked for: the batch's only model, or the one that its answer names."""
    if len(models) == 1:
        return models[0]
    answered = str((result.body or {}).get("model"))
    return answered if answered in models else _UNKNOWN_MODEL


def _keep(
    session: Session, batch: Batch, blobs: BlobStore, settings: Settings, file_id: str, size_bytes: int, kind: str
) -> str | None:
    """Register a produced file; an empty one is deleted."""
    if size_bytes == 0:
        blobs.delete(file_id)
        return None
    row = add_file(
        session,
        file_id=file_id,
        tenant=batch.tenant,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        size_bytes=size_bytes,
        keep=timedelta(seconds=batch.output_keep_s) if batch.output_keep_s else timedelta(days=settings.file_keep_days),
    )
    return row.id


def _line(batch: Batch, custom_id: str, result: BatchResult) -> dict[str, Any]:
    response = None
    if result.status_code is not None:
        response = {"status_code": result.status_code, "request_id": result.upstream_id, "body": result.body}
    return {
        "id": f"batch_req_{batch.number}_{result.line}",
        "custom_id": custom_id,
        "response": response,
        "error": result.error,
    }
