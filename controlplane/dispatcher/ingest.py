"""Validating a batch's input: all lines become requests in one transaction, or the batch fails with its errors."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import structlog
from sqlalchemy.exc import DataError, SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.dispatcher.steps import Step
from controlplane.errors import InvalidValueError, NotFoundError, TidepoolError, UnavailableError
from controlplane.policies.aliases import main_model
from controlplane.policies.lifecycle import BatchState
from controlplane.serving.endpoints import EndpointRequest, parse_json, stored_query
from controlplane.serving.in_flight import BYTES_PER_TOKEN, OUTPUT_TOKENS_GUESS, check_context, check_task
from controlplane.serving.query import Query
from controlplane.settings import Settings
from controlplane.store.batch_attempts import Due
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import BatchError, NewRequest, add_requests, fail_batch, move_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.fleet import Catalog, keep_models, load_catalog
from controlplane.store.tenants import batch_tokens_left
from dataplane.protocol.tiers import Tier

log = structlog.get_logger()
_ERRORS_SHOWN_MAX = 100
_CUSTOM_ID_MAX = 512
_NO_MODEL = "the model '{}' does not exist"


class LineError(Exception):
    """The fault of one line."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class _Line(msgspec.Struct):
    """A line's fields, not yet validated. The body stays JSON."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class LineReader:
    """Validates the lines of one batch file, each once. `errors`: the faults found; after the first one, other lines
    are only checked. `tokens`: an estimate of what the valid lines may take. `asked`: the first of them for each model.
    """

    def __init__(self, batch: Batch, catalog: Catalog, lines_max: int) -> None:
        self._endpoint = batch.endpoint
        aliases = {name: catalog.models[main_model(weights)] for name, weights in catalog.aliases.items()}
        models = catalog.models | aliases
        self._models = {name: model for name, model in models.items() if batch.models is None or name in batch.models}
        self._lines_max = lines_max
        self._seen: dict[str, int] = {}
        self._decoder = msgspec.json.Decoder(_Line)
        self.errors: list[BatchError] = []
        self.tokens = 0
        self.asked: dict[str, int] = {}

    def requests(self, stream: Iterable[bytes]) -> Iterator[NewRequest]:
        """The lines as requests, up to the first invalid one."""
        count = 0
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            count += 1
            if count > self._lines_max:
                message = f"at most {self._lines_max} lines are allowed"
                self.errors = [BatchError(code="too_many_lines", message=message, line=number)]
                return
            try:
                request = self.read(number, line)
            except LineError as error:
                self.errors.append(BatchError(code=error.code, message=error.message, param=error.param, line=number))
                if len(self.errors) >= _ERRORS_SHOWN_MAX:
                    return
            else:
                if not self.errors:
                    yield request
        if not count:
            self.errors = [BatchError(code="empty_file", message="the input file has no line")]

    def read(self, number: int, line: bytes) -> NewRequest:
        """A line as a request.

        Raises:
            LineError: the line is invalid.
        """
        try:
            fields = self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise LineError("invalid_json_line", "not a JSON object", None) from error
        except (ValueError, RecursionError) as error:
            raise LineError("invalid_json_line", f"not valid JSON: {error}", None) from error
        custom_id = self._custom_id(fields.custom_id, number)
        if fields.method != "POST":
            raise LineError("invalid_method", f"method must be 'POST', not {_quoted(fields.method)}", "method")
        if fields.url != self._endpoint:
            message = f"url must be the batch's endpoint '{self._endpoint}', not {_quoted(fields.url)}"
            raise LineError("mismatched_url", message, "url")
        body = bytes(fields.body)
        if not body.startswith(b"{"):
            raise LineError("missing_required_parameter", "body must be a JSON object", "body")
        request, query = self._check_body(body)
        answers = len(query.prompts) * query.best_of if query.task == "generate" else 0
        input_tokens = len(body) // BYTES_PER_TOKEN
        tokens = input_tokens + answers * (request.tokens_max() or OUTPUT_TOKENS_GUESS)
        self.tokens += tokens
        self.asked.setdefault(query.model, number)
        return NewRequest(
            line=number,
            custom_id=custom_id,
            model=query.model,
            body=stored_query(query),
            input_tokens=input_tokens,
            tokens=tokens,
        )

    def _custom_id(self, custom_id: Any, number: int) -> str:
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _CUSTOM_ID_MAX:
            message = f"custom_id must be a string of 1 to {_CUSTOM_ID_MAX} characters"
            raise LineError("missing_required_parameter", message, "custom_id")
        if "\0" in custom_id:
            raise LineError("invalid_value", "custom_id must not hold U+0000", "custom_id")
        first = self._seen.setdefault(custom_id, number)
        if first != number:
            raise LineError("duplicate_custom_id", f"custom_id '{custom_id}' is that of line {first} too", "custom_id")
        return custom_id

    def _check_body(self, body: bytes) -> tuple[EndpointRequest, Query]:
        try:
            request = parse_json(self._endpoint, body)
            if request.stream:
                raise InvalidValueError("stream is not allowed in a batch", param="stream")
            model = self._models.get(request.model)
            if model is None:
                raise NotFoundError(_NO_MODEL.format(request.model), param="model")
            check_context(request.tokens_max(), model)
            query = request.query(tier=Tier.NIW).of_model(model.name)
            check_task(query.task, model)
        except TidepoolError as error:
            code = "model_not_found" if isinstance(error, NotFoundError) else error.code
            raise LineError(code, error.message, f"body.{error.param}" if error.param else "body") from error
        return request, query


def validate(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> Callable[[], None]:
    """Put all lines of a batch in the queue; returns how the batch then begins, or fails with its errors.

    Raises:
        SQLAlchemyError, OSError, UnavailableError: Postgres or the files are unavailable; nothing was changed.
    """
    errors = _errors_of(session, batch, blobs, settings)
    if errors:
        return partial(fail_batch, session, batch, errors)
    return partial(move_batch, session, batch, BatchState.IN_PROGRESS)


VALIDATE = Step(Due.VALIDATION, validate)


def _errors_of(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> list[BatchError]:
    """Ingest a batch, all of it or, if it has errors, nothing."""
    try:
        with session.begin_nested() as savepoint:
            errors = _ingest(session, batch, blobs, settings)
            if errors:
                savepoint.rollback()
            return errors
    except NotFoundError as error:
        return [BatchError(code="file_not_found", message=error.message, param="input_file_id")]
    except Exception as error:
        if isinstance(error, SQLAlchemyError | OSError | UnavailableError) and not isinstance(error, DataError):
            raise  # an outage of Postgres, of the disk or of the bucket is no error of the batch: it waits
        log.exception("a batch cannot be validated", batch=batch.id)  # a defect here must not block other batches
        return [BatchError(code="internal_error", message="the batch could not be validated; nothing of it ran")]


def _ingest(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> list[BatchError]:
    """Put all lines of a batch in the queue; if there are errors, the caller rolls back."""
    reader = LineReader(batch, load_catalog(session), settings.batch_lines_max)
    with blobs.open(batch.input_file_id) as stream:
        add_requests(session, batch, reader.requests(stream))
    if reader.errors:
        return reader.errors
    with session.no_autoflush:  # the batch's row is not locked while its tenant's lock is waited for
        left = batch_tokens_left(session, batch.tenant, settings, besides={batch.number})
    if left is None or reader.tokens <= left:
        return _errors_of_deleted(session, reader.asked)
    message = (
        f"the batch may take {reader.tokens} tokens, and tenant '{batch.tenant}' may queue {max(0, left)} more now"
        " (queued_batch_tokens_max); try again when queued requests have ended"
    )
    return [BatchError(code="token_limit_exceeded", message=message)]


def _errors_of_deleted(session: Session, asked: Mapping[str, int]) -> list[BatchError]:
    """Errors of lines whose models were deleted while the lines were read. The others stay, as the batch begins now."""
    kept = keep_models(session, asked)
    return [
        BatchError(code="model_not_found", message=_NO_MODEL.format(model), param="body.model", line=line)
        for model, line in asked.items()
        if model not in kept
    ]


def _quoted(value: Any) -> str:
    """A string or number as a message quotes it; of other values, which may be of any size and depth, only the type."""
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)
