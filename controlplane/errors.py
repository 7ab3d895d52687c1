"""The control plane's exception tree. Each class carries its HTTP status and a stable code; the edge translates."""

from dataclasses import asdict, dataclass
from typing import Any


class TidepoolError(Exception):
    """Something the caller must hear. `param` names the field at fault, where there is one. `retry_helps`: whether the
    same request may fare better in a while; None: its status says as much.
    """

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None
    retry_helps: bool | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        retry_helps: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        if retry_helps is not None:
            self.retry_helps = retry_helps

    def extensions(self) -> dict[str, Any]:
        """Members that a problem of this kind has besides those that all have."""
        return {}


class InvalidValueError(TidepoolError):
    """A field holds what it may not hold."""

    status = 400
    code = "invalid_value"


class UnknownParameterError(InvalidValueError):
    """A field that does not exist."""

    code = "unknown_parameter"


class UnsupportedParameterError(InvalidValueError):
    """A field of OpenAI's API that asks for what is not supported yet."""

    code = "unsupported_parameter"


class WrongTaskError(InvalidValueError):
    """The model does not answer with what the endpoint is for."""

    code = "model_not_supported"


class ContextLengthError(InvalidValueError):
    """Prompt and requested tokens do not fit the model."""

    code = "context_length_exceeded"


class PreviousResponseError(InvalidValueError):
    """A response that shall be continued, or one before it, is not there."""

    code = "previous_response_not_found"


class AuthenticationError(TidepoolError):
    """No key, or one that is unknown, revoked or expired."""

    status = 401
    code = "invalid_api_key"


class SignInNeededError(AuthenticationError):
    """No session. `ways`: how a person may sign in; `oidc_name`: what the OpenID provider is called, if there is
    one.
    """

    code = "sign_in_needed"

    def __init__(self, message: str, *, ways: tuple[str, ...], oidc_name: str | None) -> None:
        super().__init__(message)
        self.ways = ways
        self.oidc_name = oidc_name

    def extensions(self) -> dict[str, Any]:
        return {"sign_in": list(self.ways), "oidc_name": self.oidc_name}


class PermissionDeniedError(TidepoolError):
    """The key is good, its role is not enough."""

    status = 403
    code = "permission_denied"


class SchemaError(TidepoolError):
    """The database has an older schema than this process needs, or none."""

    status = 503
    code = "schema_too_old"


class NotFoundError(TidepoolError):
    """No such thing, or none that this caller may see."""

    status = 404
    code = "not_found"


class UnknownModelError(NotFoundError):
    """No model of that name is registered."""

    code = "model_not_found"


class ConflictError(TidepoolError):
    """The request contradicts the present state."""

    status = 409
    code = "conflict"
    retry_helps = False


@dataclass(frozen=True, kw_only=True)
class Use:
    """Some things of one kind that use another: how many, the names of the first few, and what to do with them."""

    kind: str
    count: int
    names: tuple[str, ...]
    then: str

    def words(self) -> str:
        """For people."""
        more = ", ..." if self.count > len(self.names) else ""
        return f"{self.count} x {self.kind} ({', '.join(self.names)}{more}): {self.then}"


class InUseError(ConflictError):
    """What shall be deleted is used by something."""

    code = "in_use"

    def __init__(self, what: str, used_by: tuple[Use, ...]) -> None:
        super().__init__(f"{what} is in use: {'; '.join(use.words() for use in used_by)}")
        self.used_by = used_by

    def extensions(self) -> dict[str, Any]:
        return {"used_by": [asdict(use) for use in self.used_by]}


class StaleIndexError(ConflictError):
    """A plan, or a decision of scaling, made from a fleet that has changed since."""

    code = "stale_index"


class TooLargeError(TidepoolError):
    """A body over its limit."""

    status = 413
    code = "request_too_large"


class RequestTimeoutError(TidepoolError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class HeadersTooLargeError(TidepoolError):
    """More headers than a request may have."""

    status = 431
    code = "headers_too_large"


class CapacityError(TidepoolError):
    """No instance can take the request now."""

    status = 503
    code = "no_capacity"
    retry_after_s = 1
    retry_helps = True


class BusyError(TidepoolError):
    """The fleet could not begin the request in time."""

    status = 429
    code = "busy"
    retry_helps = True


class NoSpareCapacityError(TidepoolError):
    """A flex request while interactive traffic needs the fleet."""

    status = 429
    code = "resource_unavailable"
    retry_after_s = 5
    retry_helps = True


class RateLimitError(TidepoolError):
    """The tenant has used up one of its limits for now."""

    status = 429
    code = "rate_limit_exceeded"
    retry_helps = True


class InsufficientQuotaError(TidepoolError):
    """A budget of the tenant is used up: asking again soon does not help."""

    status = 429
    code = "insufficient_quota"
    retry_helps = False


class UnavailableError(TidepoolError):
    """A part this answer needs is down."""

    status = 503
    code = "unavailable"
    retry_after_s = 2
    retry_helps = True


class NodeError(TidepoolError):
    """A node failed or refused. `retryable`: another instance may do better. `untouched`: no node did anything with the
    request, since it was not reached or its instance is not ready, so that the same node may be asked again.
    """

    status = 502
    code = "node_error"

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        code: str = "node_error",
        param: str | None = None,
        retryable: bool = True,
        untouched: bool = False,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code
        self.retryable = retryable
        self.untouched = untouched


class ReroutedError(NodeError):
    """The request leaves the node, where it would wait, for another instance."""

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"the request goes to instance {instance_id}", untouched=True)
        self.instance_id = instance_id
