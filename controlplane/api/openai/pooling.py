"""Embeddings, scores of pairs of texts, and documents by their rank."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from controlplane.api.auth import require_model
from controlplane.api.openai.answering import Origin, answer
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import state_of
from controlplane.serving.endpoints import ENDPOINTS
from controlplane.serving.pooling_requests import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from controlplane.serving.query import Query

router = APIRouter(tags=["interactive"])


@router.post(EMBEDDINGS, summary="Embeddings", responses=ERRORS)
async def embeddings(body: EmbeddingRequest, request: Request, origin: Origin = None) -> Response:
    """The embedding of each input, in order. `dimensions` cuts an embedding to its first numbers, of length 1 again."""
    return await _answer(EMBEDDINGS, body.query(tier=body.tier()), request, origin)


@router.post(SCORE, summary="Scores of pairs of texts", responses=ERRORS)
async def score(body: ScoreRequest, request: Request, origin: Origin = None) -> Response:
    """How well texts match, in vLLM's shape: by the model's head, or by the cosine of the angle between embeddings."""
    return await _scored(SCORE, body, request, origin)


@router.post(RERANK, summary="Documents by their relevance to a query", responses=ERRORS)
async def rerank(body: RerankRequest, request: Request, origin: Origin = None) -> Response:
    """Documents by their score with a query, the best first, in the shape of Jina, Cohere and vLLM."""
    return await _scored(RERANK, body, request, origin)


async def _scored(endpoint: str, body: ScoreRequest | RerankRequest, request: Request, origin: str | None) -> Response:
    """The answer of a model that scores pairs, or of one that embeds each text."""
    require_model(request.state.caller, body.model)
    model = await state_of(request).fleet.asked(body.model)
    query = body.query(tier=body.tier(), task="embed" if model.task == "embed" else "score")
    return await _answer(endpoint, query, request, origin)


async def _answer(endpoint: str, query: Query, request: Request, origin: str | None) -> Response:
    renderer = partial(ENDPOINTS[endpoint].renderer, answer_id=request.state.request_id)
    return await answer(request, query, renderer, stream=False, origin=origin)
