"""The tokens of a text and the text of tokens, as vLLM's server answers them."""

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from controlplane.api.openai.answering import model_for
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import state_of
from controlplane.serving.agent_client import Answered
from controlplane.serving.token_requests import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest
from dataplane.protocol.messages import Detokenize, Detokenized, Tokenize, Tokenized

router = APIRouter(tags=["interactive"], responses=ERRORS)


class TokenizeAnswer(BaseModel):
    """The tokens of a text. `max_model_len`: the most tokens of prompt and answer together."""

    count: int = Field(examples=[2])
    max_model_len: int = Field(examples=[40_960])
    tokens: list[int] = Field(examples=[[9707, 0]])
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """The text of tokens, special ones included."""

    prompt: str


@router.post(TOKENIZE, summary="Tokens of a text")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeAnswer:
    """The tokens of a prompt, or of a conversation as the model's chat template writes it. Any instance of the model
    answers; the request counts towards the tenant's requests per minute, and takes none of its tokens.
    """
    answer = await ask_node(request, TOKENIZE, body.question(), Tokenized)
    return TokenizeAnswer(
        count=len(answer.tokens),
        max_model_len=answer.context_tokens,
        tokens=list(answer.tokens),
        token_strs=list(answer.spelled) if body.return_token_strs else None,
    )


@router.post(DETOKENIZE, summary="Text of tokens")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeAnswer:
    """The text of tokens; limited as `/tokenize` is."""
    answer = await ask_node(request, DETOKENIZE, body.question(), Detokenized)
    return DetokenizeAnswer(prompt=answer.text)


async def ask_node(request: Request, path: str, question: Tokenize | Detokenize, kind: type[Answered]) -> Answered:
    """The answer of any instance of a model that the caller may use, as one request of its tenant.

    Raises:
        TidepoolError: the question is refused, or no instance answers it.
    """
    state = state_of(request)
    model = await model_for(request, question.model)
    question = msgspec.structs.replace(question, model=model.name)
    async with state.limits.one_request(request, model.name):
        return await state.questions.ask(path, question, kind, origin=state.settings.region)
