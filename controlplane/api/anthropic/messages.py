"""The Messages API."""

from typing import Any

import uuid_utils
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from controlplane.api.openai.answering import Origin, answer
from controlplane.serving.anthropic.renderer import MessagesRenderer
from controlplane.serving.anthropic.requests import MESSAGES, MessagesRequest

_EVENT = (
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":"Hi"}}\n\n'
)


class AnthropicErrorDetail(BaseModel):
    """What went wrong; the message names the field at fault."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """A failure under `/v1/messages`."""

    type: str
    error: AnthropicErrorDetail
    request_id: str | None


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the message; as server-sent events when `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {"example": _EVENT}},
    },
    "4XX": {"description": "the request is refused", "model": AnthropicError},
    "5XX": {"description": "nothing can serve it now", "model": AnthropicError},
}
router = APIRouter(tags=["messages"])


@router.post(MESSAGES, summary="Create a message", responses=_ANSWERS)
async def create(body: MessagesRequest, request: Request, origin: Origin = None) -> Response:
    """A message in Anthropic's shape, whole or (`stream: true`) as server-sent events. The key may come in the header
    `x-api-key`.
    """
    query = body.query(tier=body.tier())
    renderer = MessagesRenderer(query, answer_id=uuid_utils.uuid7().hex)
    return await answer(request, query, renderer, stream=body.stream, origin=origin)
