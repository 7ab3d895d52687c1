"""Bodies of requests to models that do not generate: embeddings as OpenAI has them, scores and ranks as vLLM does."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    model_validator,
)

from controlplane.errors import InvalidValueError
from controlplane.serving.openai_fields import RequestBody, Text, TokenId, fault
from controlplane.serving.openai_requests import ServiceTier, tier_of
from controlplane.serving.query import Query
from dataplane.protocol.messages import ChatMessage, Generate, Sampling, Task
from dataplane.protocol.tiers import Tier

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
INPUTS_MAX = 2048
"""Texts of one request, as OpenAI limits them."""
PAIRS_CHARACTERS_MAX = 2**25
"""Of the texts of all pairs that are sent to nodes. A text that is paired with many counts for each of them."""

InputText = Annotated[Text, Field(min_length=1)]
InputTokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[InputText], Field(min_length=1, max_length=INPUTS_MAX, fail_fast=True)]


def _inputs(value: Any) -> Any:
    """One text or one list of tokens as a list of inputs, so that an error names the input at fault."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return [value]
    return value


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _kind(value: Any) -> str:
    """Whether inputs are texts or lists of tokens; the name is one that `first_fault` leaves out of a path."""
    return "list[tokens]" if isinstance(value, list) and value and isinstance(value[0], list) else "list[text]"


Inputs = Annotated[
    Annotated[Texts, Tag("list[text]")]
    | Annotated[list[InputTokens], Field(min_length=1, max_length=INPUTS_MAX, fail_fast=True), Tag("list[tokens]")],
    Discriminator(_kind),
    BeforeValidator(_inputs),
]
OneOrMore = Annotated[Texts, BeforeValidator(_texts)]


class PoolingRequest(RequestBody):
    """The fields of all three."""

    stream: ClassVar[bool] = False
    user: str | None = Field(None, max_length=512)
    service_tier: ServiceTier | None = Field(None, description="extension")

    def tier(self) -> Tier:
        return tier_of(self.service_tier)

    def tokens_max(self) -> int | None:
        """None: there are no tokens to generate."""
        return None

    def _message(self, tier: Tier, **prompt: Any) -> Generate:
        return Generate(
            request_id="", instance_id="", model=self.model, tier=tier, sampling=Sampling(), pooling=True, **prompt
        )

    def _pairs(self, field: str, left: list[str], right: list[str], tier: Tier, task: Task, **options: Any) -> Query:
        """A query for the scores of pairs: each text of a model that embeds, once; else each pair. A single text on the
        left is paired with each on the right. `field`: of the texts on the left.

        Raises:
            InvalidValueError: the texts of all pairs have more than `PAIRS_CHARACTERS_MAX` characters.
        """
        if task == "embed":
            texts = dict.fromkeys([*left, *right])
            number = {text: index for index, text in enumerate(texts)}
            pairs = [(number[one], number[other]) for one, other in zip(_spread(left, right), right, strict=True)]
            prompts = tuple(self._message(tier, prompt=text) for text in texts)
            return Query(prompts=prompts, task="embed", options={"pairs": pairs, **options})
        characters = sum(map(len, _spread(left, right))) + sum(map(len, right))
        if characters > PAIRS_CHARACTERS_MAX:
            message = f"{field}: at most {PAIRS_CHARACTERS_MAX} characters in the texts of all pairs, not {characters}"
            raise InvalidValueError(message, param=field)
        prompts = tuple(
            self._message(
                tier,
                messages=(ChatMessage(role="query", content=one), ChatMessage(role="document", content=other)),
            )
            for one, other in zip(_spread(left, right), right, strict=True)
        )
        return Query(prompts=prompts, task="score", options=options)


def _spread(left: list[str], right: list[str]) -> list[str]:
    return left * len(right) if len(left) == 1 else left


class EmbeddingRequest(PoolingRequest):
    """`POST /v1/embeddings`."""

    input: Inputs = Field(description="a text, a list of tokens, or up to 2048 of either")
    dimensions: StrictInt | None = Field(None, ge=1, le=2**20, description="to how many numbers embeddings are cut")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian 32-bit numbers"
    )
    prompt_name: Text | None = Field(
        None, max_length=200, description="extension: the checkpoint's own prompt that precedes each text"
    )

    def query(self, *, tier: Tier) -> Query:
        """One message for each input."""
        common = {"dimensions": self.dimensions, "prompt_name": self.prompt_name}
        prompts = tuple(
            self._message(tier, prompt=one, **common)
            if isinstance(one, str)
            else self._message(tier, prompt_tokens=tuple(one), **common)
            for one in self.input
        )
        options = {"encoding_format": "base64"} if self.encoding_format == "base64" else {}
        return Query(prompts=prompts, task="embed", input_field="input", options=options)


class ScoreRequest(PoolingRequest):
    """`POST /v1/score`: one text against one or more, or as many against as many."""

    text_1: OneOrMore = Field(description="a text or a list of texts")
    text_2: OneOrMore = Field(description="a text or a list of texts")

    @model_validator(mode="after")
    def _pairs_match(self) -> "ScoreRequest":
        if len(self.text_1) not in (1, len(self.text_2)):
            raise fault("text_1", f"one text or as many as text_2 has, {len(self.text_2)}")
        return self

    def query(self, *, tier: Tier, task: Task = "score") -> Query:
        """One message for each pair, or for each text where the model embeds. Raises as `_pairs`."""
        return self._pairs("text_1", self.text_1, self.text_2, tier, task)


class RerankDocument(BaseModel):
    """A document as an object; other fields of it are ignored."""

    model_config = ConfigDict(extra="ignore")
    text: InputText


class RerankRequest(PoolingRequest):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it."""

    query_text: InputText = Field(alias="query")
    documents: list[InputText | RerankDocument] = Field(min_length=1, max_length=INPUTS_MAX, fail_fast=True)
    top_n: StrictInt | None = Field(None, ge=0, description="how many of the best are returned; 0: all")
    return_documents: bool = Field(True, description="whether results repeat their documents")

    def query(self, *, tier: Tier, task: Task = "score") -> Query:
        """One message for each document, or for each text where the model embeds. Raises as `_pairs`."""
        texts = [document if isinstance(document, str) else document.text for document in self.documents]
        options: dict[str, Any] = {"top_n": self.top_n} if self.top_n else {}
        if self.return_documents:
            options["documents"] = texts
        return self._pairs("query", [self.query_text], texts, tier, task, **options)
