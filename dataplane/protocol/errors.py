"""The data plane's exception tree. Each carries the HTTP status the node answers with."""

from dataplane.protocol.messages import ANSWER_FAILED, INSTANCE_NOT_READY, STALE_EPOCH


class DataplaneError(Exception):
    """A node refuses or fails. `status` is the HTTP status, `code` a stable identifier."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequestError(DataplaneError):
    """The request is invalid; `param` names the field."""

    status = 400
    code = "invalid_value"


class ContextLengthError(BadRequestError):
    """Prompt and `max_tokens` together do not fit the model's context or its KV cache."""

    code = "context_length_exceeded"


class UnknownInstanceError(DataplaneError):
    """The instance is not on this node, or not ready. Another instance may serve the request."""

    status = 409
    code = INSTANCE_NOT_READY


class StaleGenerationError(DataplaneError):
    """A desired state older than the one that this node follows."""

    status = 409
    code = "stale_generation"


class StaleTermError(StaleGenerationError):
    """A desired state from the primary of an older term than this node has seen."""

    code = "stale_term"


class StaleEpochError(DataplaneError):
    """A command of a claim that is older than the newest that this node has seen of the request."""

    status = 409
    code = STALE_EPOCH


class AnswerFailedError(DataplaneError):
    """An answer cannot be made of its tokens, by a defect of ours. No other instance could make it."""

    code = ANSWER_FAILED


class OverloadedError(DataplaneError):
    """The node's queue is full."""

    status = 429
    code = "overloaded"


class ModelLoadError(DataplaneError):
    """A checkpoint that cannot be read: missing file, wrong shape, unsupported architecture."""

    status = 422
    code = "model_load_failed"


class DeviceLostError(DataplaneError):
    """The process lost its device. Its requests continue in the next process."""

    status = 503
    code = "device_lost"


class WorkerLostError(DataplaneError):
    """A worker process died; the agent restarts it."""

    status = 503
    code = "worker_lost"
