"""Validating a batch's input: all lines become requests in one transaction, or the batch fails and says why."""

from collections.abc import Iterator
from typing import IO, Any

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError, NotFoundError, TidepoolError
from controlplane.policies.lifecycle import BatchState
from controlplane.serving.openai_requests import parse_body, to_outgoing
from controlplane.settings import Settings
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import NewRequest, add_requests, claim_validating, move_batch
from controlplane.store.blobs import BlobStore
from controlplane.store.fleet import load_catalog
from controlplane.store.tables import Model

log = structlog.get_logger()
_ERRORS_SHOWN_MAX = 100
_CUSTOM_ID_MAX = 512


class LineError(Exception):
    """What is wrong with one line, as OpenAI's `errors.data` shows it."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class LineReader:
    """Checks the lines of one batch file."""

    def __init__(self, batch: Batch, models: dict[str, Model]) -> None:
        self._batch = batch
        self._models = models
        self._seen: dict[str, int] = {}

    def read(self, number: int, line: bytes) -> NewRequest:
        """A line as a request.

        Raises:
            LineError: it is not one.
        """
        try:
            fields = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            raise LineError("invalid_json_line", f"not valid JSON: {error}", None) from error
        if not isinstance(fields, dict):
            raise LineError("invalid_json_line", "not a JSON object", None)
        custom_id = self._custom_id(fields, number)
        if fields.get("method") != "POST":
            raise LineError("invalid_method", f"method must be 'POST', not {fields.get('method')!r}", "method")
        if fields.get("url") != self._batch.endpoint:
            message = f"url must be the batch's endpoint '{self._batch.endpoint}', not {fields.get('url')!r}"
            raise LineError("mismatched_url", message, "url")
        body = fields.get("body")
        if not isinstance(body, dict):
            raise LineError("missing_required_parameter", "body must be a JSON object", "body")
        return NewRequest(line=number, custom_id=custom_id, model=self._check_body(body), body=body)

    def _custom_id(self, fields: dict[str, Any], number: int) -> str:
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _CUSTOM_ID_MAX:
            message = f"custom_id must be a string of 1 to {_CUSTOM_ID_MAX} characters"
            raise LineError("missing_required_parameter", message, "custom_id")
        if "\0" in custom_id:
            raise LineError("invalid_value", "custom_id must not hold U+0000", "custom_id")
        first = self._seen.setdefault(custom_id, number)
        if first != number:
            raise LineError("duplicate_custom_id", f"custom_id '{custom_id}' is that of line {first} too", "custom_id")
        return custom_id

    def _check_body(self, body: dict[str, Any]) -> str:
        """The model that the body asks for."""
        try:
            request = parse_body(self._batch.endpoint, body)
            if request.stream:
                raise InvalidValueError("stream is not allowed in a batch", param="stream")
            model = self._models.get(request.model)
            if model is None:
                raise NotFoundError(f"the model '{request.model}' does not exist", param="model")
            to_outgoing(request, model, request_id="", tier=request.tier(), origin=None)
        except TidepoolError as error:
            code = "model_not_found" if isinstance(error, NotFoundError) else error.code
            raise LineError(code, error.message, f"body.{error.param}" if error.param else "body") from error
        return request.model


def ingest_one(session: Session, blobs: BlobStore, settings: Settings) -> str | None:
    """Validate one batch that waits for it; returns its id."""
    batch = claim_validating(session)
    if batch is None:
        return None
    try:
        with session.begin_nested():
            errors = _take_in(session, batch, blobs, settings)
    except NotFoundError as error:
        errors = [_entry("file_not_found", error.message, "input_file_id", None)]
    except SQLAlchemyError:
        raise  # the database's trouble is not the batch's: it waits
    except Exception:
        log.exception(
            "a batch cannot be validated", batch=batch.id
        )  # a defect of ours must not block the batches behind
        errors = [_entry("internal_error", "the batch could not be validated; nothing of it ran", None, None)]
    if errors:
        batch.errors = {"object": "list", "data": errors}
    move_batch(session, batch, BatchState.FAILED if errors else BatchState.IN_PROGRESS)
    return batch.id


def _take_in(session: Session, batch: Batch, blobs: BlobStore, settings: Settings) -> list[dict[str, Any]]:
    """Put all lines of a batch in the queue, or none and say what is wrong with them."""
    models = load_catalog(session).models
    errors = _check_all(batch, models, blobs, settings)
    if not errors:
        reader = LineReader(batch, models)
        with blobs.open(batch.input_file_id) as stream:
            add_requests(session, batch, (reader.read(number, line) for number, line in _lines(stream)))
    return errors


def _check_all(batch: Batch, models: dict[str, Model], blobs: BlobStore, settings: Settings) -> list[dict[str, Any]]:
    reader = LineReader(batch, models)
    errors: list[dict[str, Any]] = []
    count = 0
    with blobs.open(batch.input_file_id) as stream:
        for number, line in _lines(stream):
            count += 1
            if count > settings.batch_lines_max:
                return [_entry("too_many_lines", f"at most {settings.batch_lines_max} lines are allowed", None, number)]
            try:
                reader.read(number, line)
            except LineError as error:
                errors.append(_entry(error.code, error.message, error.param, number))
                if len(errors) >= _ERRORS_SHOWN_MAX:
                    return errors
    return errors if count else [_entry("empty_file", "the input file has no line", None, None)]


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(stream, start=1) if line.strip())


def _entry(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
