"""`Idempotency-Key` on every POST: the same request with the same key changes things once and answers the same.

The answer is kept in the transaction of the change itself. So a key whose request failed is free again, one whose
request is still running makes the second wait for the first, and nothing can be done without being remembered.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from controlplane.api.auth import authenticate
from controlplane.api.credentials import Caller
from controlplane.api.state import SessionDep
from controlplane.store.keys import claim_idempotency, keep_answer

KEY_CHARS_MAX = 255
_Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=KEY_CHARS_MAX,
        pattern=r"^[\x21-\x7e]+$",
        description="any word of yours: a repeated request with it is answered as the first was",
    ),
]


class _AnsweredBeforeError(Exception):
    """The request was answered already; what was kept is the answer."""

    def __init__(self, *, status: int, body: str) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


async def body_digest(request: Request) -> str:
    """SHA-256 of the request's body. Who spools a huge body to disk puts its digest into `request.state` first."""
    spooled = getattr(request.state, "body_digest", None)
    return spooled if isinstance(spooled, str) else hashlib.sha256(await request.body()).hexdigest()


async def claim_key(
    request: Request,
    session: SessionDep,
    caller: Annotated[Caller, Depends(authenticate)],
    digest: Annotated[str, Depends(body_digest)],
    key: _Key = None,
) -> None:
    """Take the request's idempotency key, or end the request with what the key answered before."""
    if key is None:
        return
    asked = f"{request.method} {request.url.path}?{request.url.query} {digest}"
    request_hash = hashlib.sha256(asked.encode()).hexdigest()
    stored = await run_in_threadpool(
        claim_idempotency, session, api_key_id=caller.key_id, key=key, request_hash=request_hash
    )
    if stored is not None:
        assert stored.status is not None, "an answer is kept in the transaction that claims its key"
        raise _AnsweredBeforeError(status=stored.status, body=stored.body or "")

    async def keep(response: Response) -> None:
        await run_in_threadpool(
            keep_answer,
            session,
            api_key_id=caller.key_id,
            key=key,
            status=response.status_code,
            body=_without_secret(bytes(response.body)),
        )

    request.state.keep_answer = keep


class IdempotentRoute(APIRoute):
    """A route whose POSTs honour `Idempotency-Key`; other methods are idempotent by nature."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if "POST" in (options.get("methods") or ()):
            options["dependencies"] = [*(options.get("dependencies") or ()), Depends(claim_key)]
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """The endpoint, then the keeping of its answer, both before the transaction commits."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                response = await answer(request)
            except _AnsweredBeforeError as before:
                return Response(before.body, status_code=before.status, media_type="application/json")
            keep = getattr(request.state, "keep_answer", None)
            if keep is not None:
                await keep(response)
            return response

        return handle


def _without_secret(body: bytes) -> str:
    """A key's secret is shown once and stored nowhere: the answer that is kept has none."""
    content = json.loads(body) if body else None
    if not isinstance(content, dict) or "secret" not in content:
        return body.decode()
    return json.dumps(content | {"secret": None})
