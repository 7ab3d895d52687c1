"""The Messages API."""

from functools import partial
from typing import Any

import uuid_utils
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from controlplane.api.openai.answering import Origin, answer
from controlplane.api.openai.tokens import ask_node
from controlplane.serving.anthropic.renderer import MessagesRenderer
from controlplane.serving.anthropic.requests import COUNT_TOKENS, MESSAGES, MessagesPrompt, MessagesRequest
from controlplane.serving.token_requests import TOKENIZE
from dataplane.protocol.messages import Tokenized

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
_COUNTS = {status: answer for status, answer in _ANSWERS.items() if status != 200}
router = APIRouter(tags=["messages"])


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


@router.post(MESSAGES, summary="Create a message", responses=_ANSWERS)
async def create(body: MessagesRequest, request: Request, origin: Origin = None) -> Response:
    """A message in Anthropic's shape, whole or (`stream: true`) as server-sent events. The key may come in the header
    `x-api-key`.
    """
    renderer = partial(MessagesRenderer, answer_id=uuid_utils.uuid7().hex)
    return await answer(request, body.query(tier=body.tier()), renderer, stream=body.stream, origin=origin)


@router.post(COUNT_TOKENS, summary="Count a message's tokens", responses=_COUNTS)
async def count_tokens(body: MessagesPrompt, request: Request) -> TokenCount:
    """The tokens of the prompt that a message with these fields would have, as the model's chat template writes it. It
    counts towards the tenant's requests per minute.
    """
    told = await ask_node(request, TOKENIZE, body.question(), Tokenized)
    return TokenCount(input_tokens=len(told.tokens))
