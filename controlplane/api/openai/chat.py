"""Chat completions and completions."""

import re
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from controlplane.api.openai.answering import Origin, answer
from controlplane.api.openai.openapi import ANSWERS
from controlplane.serving.endpoints import ENDPOINTS
from controlplane.serving.openai_requests import (
    CHAT,
    COMPLETIONS,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)

router = APIRouter(tags=["interactive"])
_PLAIN_WORD = re.compile("[A-Za-z0-9_-]{1,64}")
_WARNINGS_MAX = 8


@router.post(CHAT, summary="Chat completion", responses=ANSWERS)
async def chat(body: ChatRequest, request: Request, origin: Origin = None) -> Response:
    """A chat completion, whole or (`stream: true`) as server-sent events. `service_tier` chooses the tier: `priority`
    is IW-F, `default` and `auto` are IW-N, `flex` is NIW and takes only spare capacity.
    """
    return await _answer(CHAT, body, request, origin)


@router.post(COMPLETIONS, summary="Text completion", responses=ANSWERS)
async def completions(body: CompletionRequest, request: Request, origin: Origin = None) -> Response:
    """A completion of a plain prompt, whole or as server-sent events."""
    return await _answer(COMPLETIONS, body, request, origin)


async def _answer(endpoint: str, body: AnyRequest, request: Request, origin: str | None) -> Response:
    options = body.stream_options or StreamOptions()
    renderer = partial(
        ENDPOINTS[endpoint].renderer, answer_id=request.state.request_id, include_usage=bool(options.include_usage)
    )
    query = body.query(tier=body.tier())
    return await answer(request, query, renderer, stream=bool(body.stream), origin=origin, headers=_warning(options))


def _warning(options: StreamOptions) -> dict[str, str]:
    """The header that names the ignored options whose names are plain words."""
    plain = [f"stream_options.{name}" for name in options.ignored() if _PLAIN_WORD.fullmatch(name)]
    return {"x-tidepool-warning": f"ignored: {', '.join(plain[:_WARNINGS_MAX])}"} if plain else {}
