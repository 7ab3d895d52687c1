"""Error responses of the admin API in the OpenAPI document: RFC 9457 problems, also for validation errors (400)."""

from typing import Any

from controlplane.api.errors import problem
from controlplane.api.openai.openapi import Problem, ref
from controlplane.errors import (
    AuthenticationError,
    CapacityError,
    ConflictError,
    InvalidValueError,
    NotFoundError,
    PermissionDeniedError,
    TidepoolError,
    TooLargeError,
    UnavailableError,
)


def described(error: TidepoolError, description: str) -> dict[str, Any]:
    """A response of the OpenAPI document with `error` as its example."""
    content = {"schema": ref(Problem), "example": problem(error)}
    return {"description": description, "content": {"application/problem+json": content}}


_TAKEN = ConflictError("this Idempotency-Key was used for another request", param="Idempotency-Key")
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: described(InvalidValueError("position: must be 0 or more", param="position"), "A field holds a wrong value."),
    401: described(AuthenticationError("Incorrect API key provided."), "No key, or not a good one."),
    403: described(PermissionDeniedError("this needs the role 'operator'"), "The key's role is not enough."),
    404: described(NotFoundError("region 'mars' is not registered", param="region"), "No such thing."),
    409: described(_TAKEN, "The request contradicts the present state."),
    413: described(TooLargeError("the body is over the limit of 4194304 bytes"), "The body is over its limit."),
    503: described(UnavailableError("the database does not answer"), "A part this answer needs is down; retry."),
    "default": described(CapacityError("try again"), "Any other failure, in the same form."),
}
