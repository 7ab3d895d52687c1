"""Errors in the shape that Anthropic's clients parse."""

from typing import Any

from controlplane.errors import TidepoolError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: TidepoolError, request_id: str | None = None) -> dict[str, Any]:
    """The error object. Its message names the field at fault, for which there is no key."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
