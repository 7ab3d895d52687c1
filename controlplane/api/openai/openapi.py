"""Pieces of the OpenAPI document that several routers share."""

import json
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

_ERROR_EXAMPLE = {
    "error": {
        "message": "The model 'llama' does not exist.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
}


_NEVER_SAID = ("HTTPValidationError", "ValidationError")
"""Schemas of the framework's own errors."""


class Problem(BaseModel):
    """RFC 9457 problem details. `code` is stable; `param` names the field at fault where there is one."""

    type: str = Field(description="a URN that names the kind of problem")
    title: str
    status: int
    detail: str = Field(description="what is wrong, in words")
    code: str
    param: str | None
    used_by: list[dict[str, Any]] | None = Field(
        None, description="code in_use: by `kind`, their `count`, the first `names`, and what to do `then`"
    )


class ErrorDetail(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """A failure under `/v1`."""

    error: ErrorDetail


def ref(model: type[BaseModel]) -> dict[str, str]:
    """The schema of a shared model, as the document refers to it."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


class DocumentedApi(FastAPI):
    """An app whose OpenAPI document says each failure once: operations refer to it."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas |= {model.__name__: model.model_json_schema() for model in (Problem, ErrorDetail)}
            schemas[Error.__name__] = Error.model_json_schema(ref_template="#/components/schemas/{model}")
            del schemas[Error.__name__]["$defs"]
            for name in _NEVER_SAID:
                schemas.pop(name, None)
            components["responses"] = _share_failures(document["paths"])
        assert self.openapi_schema is not None
        return self.openapi_schema


def _share_failures(paths: dict[str, Any]) -> dict[str, Any]:
    """Replace the responses of all operations that are no success by references; gives what they refer to."""
    shared: dict[str, Any] = {}
    names: dict[str, str] = {}
    for operation in (each for methods in paths.values() for each in methods.values()):
        operation["responses"].pop("422", None)  # the framework's own; what is invalid gets 400
        for status, response in operation["responses"].items():
            if status.startswith("2") or "content" not in response:
                continue
            text = json.dumps(response, sort_keys=True)
            if text not in names:
                kind = "Problem" if "application/problem+json" in response["content"] else "Error"
                name = f"{kind}{status.capitalize()}"
                names[text] = name if name not in shared else f"{name}-{len(shared)}"
                shared[names[text]] = response
            operation["responses"][status] = {"$ref": f"#/components/responses/{names[text]}"}
    return shared


def _error(description: str) -> dict[str, Any]:
    content = {"schema": ref(Error), "example": _ERROR_EXAMPLE}
    return {"description": description, "content": {"application/json": content}}


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
