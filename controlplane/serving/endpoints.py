"""The endpoints that make answers from nodes' events: how their requests are read, and how their answers are made.
Gateways and dispatchers use the same table, so what is here with `batch` is a batch endpoint too.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel, ValidationError

from controlplane.serving.answers import Renderer
from controlplane.serving.anthropic.renderer import MessagesRenderer
from controlplane.serving.anthropic.requests import MESSAGES, MessagesRequest
from controlplane.serving.chat_answers import ChatRenderer
from controlplane.serving.completion_answers import CompletionRenderer
from controlplane.serving.openai_requests import CHAT, COMPLETIONS, ChatRequest, CompletionRequest, first_fault
from controlplane.serving.pooling_answers import EmbeddingRenderer, RerankRenderer, ScoreRenderer
from controlplane.serving.pooling_requests import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from controlplane.serving.query import Query
from controlplane.serving.responses.renderer import ResponseRenderer
from controlplane.serving.responses.requests import RESPONSES, BatchedResponseRequest
from dataplane.protocol.messages import Generate
from dataplane.protocol.tiers import Tier


class EndpointRequest(Protocol):
    """What every endpoint's body offers."""

    @property
    def model(self) -> str:
        """The model that is asked for."""
        ...

    @property
    def stream(self) -> bool | None:
        """Whether the answer shall be a stream, which batches refuse."""
        ...

    def tokens_max(self) -> int | None:
        """The most tokens of one answer; None: as many as fit."""
        ...

    def query(self, *, tier: Tier) -> Query:
        """The request as nodes take it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint: the model of its body, the maker of its answer, and whether a batch may name it."""

    request: type[BaseModel]
    renderer: type[Renderer]
    batch: bool = True


ENDPOINTS: dict[str, Endpoint] = {
    CHAT: Endpoint(request=ChatRequest, renderer=ChatRenderer),
    COMPLETIONS: Endpoint(request=CompletionRequest, renderer=CompletionRenderer),
    MESSAGES: Endpoint(request=MessagesRequest, renderer=MessagesRenderer, batch=False),
    RESPONSES: Endpoint(request=BatchedResponseRequest, renderer=ResponseRenderer),
    EMBEDDINGS: Endpoint(request=EmbeddingRequest, renderer=EmbeddingRenderer),
    SCORE: Endpoint(request=ScoreRequest, renderer=ScoreRenderer, batch=False),
    RERANK: Endpoint(request=RerankRequest, renderer=RerankRenderer, batch=False),
}
BATCH_ENDPOINTS = tuple(path for path, endpoint in ENDPOINTS.items() if endpoint.batch)
_MESSAGES = msgspec.json.Decoder(Generate)
_QUERIES = msgspec.json.Decoder(Query)


def parse_json(endpoint: str, body: bytes) -> EndpointRequest:
    """A batch line's body, JSON that was not decoded, as the endpoint's request.

    Raises:
        InvalidValueError: the body is invalid; the message names the field.
    """
    try:
        request: Any = ENDPOINTS[endpoint].request.model_validate_json(body)
    except ValidationError as error:
        raise first_fault(error.errors()[0]) from error
    read: EndpointRequest = request
    return read


def stored_query(query: Query) -> bytes:
    """A query as the queue stores it: one that is a single message as that message, which older versions read too."""
    plain = query == Query(prompts=query.prompts[:1])
    return msgspec.json.encode(query.prompts[0] if plain else query)


def queued_query(endpoint: str, stored: str) -> Query:
    """The query of a batch line as the queue stores it. It was validated when it was stored and is only decoded. A line
    that an older version stored is the client's own body: it has neither `request_id` nor `prompts`, which no endpoint
    accepts, so it cannot be taken for a message or a query, and is validated again.

    Raises:
        InvalidValueError: an older version's line is no request by today's rules.
    """
    try:
        return Query(prompts=(_MESSAGES.decode(stored),))
    except msgspec.ValidationError:
        pass
    try:
        return _QUERIES.decode(stored)
    except msgspec.ValidationError:
        return parse_json(endpoint, stored.encode()).query(tier=Tier.NIW)
