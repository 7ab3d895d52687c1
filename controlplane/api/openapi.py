"""Pieces of the OpenAPI document that several routers share."""

from typing import Any

_ERROR_EXAMPLE = {
    "error": {
        "message": "The model 'llama' does not exist.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"example": _ERROR_EXAMPLE}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error("a field holds what it may not hold; `param` names it"),
    401: _error("no key, or not a good one"),
    403: _error("the key's role is not enough"),
    404: _error("no such thing"),
    408: _error("the body did not arrive in time"),
    409: _error("the request contradicts the present state"),
    413: _error("the body is over the limit"),
    431: _error("more headers than a request may have"),
    429: _error("too much at once; Retry-After says when"),
    499: _error("the client went away"),
    500: _error("a defect of ours; the request id finds it in the log"),
    502: _error("every node that was tried failed"),
    503: _error("nothing can serve it now; Retry-After says when"),
}

_CHUNK = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer; as server-sent events when `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {"example": _CHUNK + "data: [DONE]\n\n"}},
    },
    **ERRORS,
}
