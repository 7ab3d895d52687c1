"""The data plane's exception tree. Each carries the HTTP status the node answers with."""

from dataplane.protocol.messages import INSTANCE_NOT_READY, STALE_EPOCH


class DataplaneError(Exception):
    """Something a node cannot do. `status` is the HTTP status, `code` a stable word for programs."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequestError(DataplaneError):
    """The request can never succeed as it stands; `param` names the field."""

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
    """Desired state older than what this node already follows."""

    status = 409
    code = "stale_generation"


class StaleEpochError(DataplaneError):
    """A command of a claim older than one this node has seen of the same request."""

    status = 409
    code = STALE_EPOCH


class OverloadedError(DataplaneError):
    """The node's queue is full."""

    status = 429
    code = "overloaded"


class ModelLoadError(DataplaneError):
    """A checkpoint that cannot be read: missing file, wrong shape, unsupported architecture."""

    status = 422
    code = "model_load_failed"


class DeviceLostError(DataplaneError):
    """The process can use its device no more; another may. Its requests go on in that one."""

    status = 503
    code = "device_lost"


class WorkerLostError(DataplaneError):
    """The worker process of a slot died; the agent restarts it."""

    status = 503
    code = "worker_lost"
