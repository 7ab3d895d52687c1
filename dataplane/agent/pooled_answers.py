"""Requests to models that embed or score: what may be asked of them, their prompts, and their streams of events.

A pair of texts to score arrives as two messages, of the roles "query" and "document".
"""

import math
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec.structs import replace

from dataplane.agent.answers import failed_event
from dataplane.agent.measures import RequestMeasure
from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.checkpoints.pooling import EmbeddingRules, ScoreRules, read_embedding_rules, read_score_rules
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineRequest
from dataplane.engines.replay.vocabulary import REPLAY_EMBEDDING_SIZE
from dataplane.protocol.errors import BadRequestError, ContextLengthError, DataplaneError
from dataplane.protocol.messages import EngineKind, Failed, Finished, Generate, ModelSpec, Pooled, Started, StreamEvent
from dataplane.runtime.tracing import current_parent

PAIR = ("query", "document")
"""The roles of the two messages of a pair."""
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web'
    " search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt that Qwen3-Reranker was trained on, from its model card: a causal model's yes or no about a pair."""

PoolingRules = EmbeddingRules | ScoreRules


def read_rules(model: ModelSpec, folder: str, engine: EngineKind) -> PoolingRules | None:
    """How a model's answers are made of the states of its tokens; None for one that generates. Blocks.

    Raises:
        ModelLoadError: the checkpoint's files cannot be used.
    """
    if model.task == "generate":
        return None
    if engine == "replay":
        return EmbeddingRules(size=REPLAY_EMBEDDING_SIZE) if model.task == "embed" else ScoreRules()
    return read_embedding_rules(Path(folder)) if model.task == "embed" else read_score_rules(Path(folder))


def check_task(generate: Generate, model: ModelSpec) -> None:
    """Refuse a request for an answer that the model does not give.

    Raises:
        BadRequestError: it names the model and its task.
    """
    if generate.pooling == (model.task != "generate"):
        return
    gives = {"generate": "text", "embed": "embeddings", "score": "scores"}[model.task]
    raise BadRequestError(f"{model.name} answers with {gives} (its task is '{model.task}')", param="model")


def takes_pairs(template: ChatTemplate | None) -> bool:
    """Whether a chat template makes one text of a query and a document, by naming these roles."""
    return template is not None and all(re.search(f"['\"]{role}['\"]", template.source) for role in PAIR)


def pooled_prompt(generate: Generate, rules: PoolingRules, template: ChatTemplate | None = None) -> Generate:
    """The request with the prompt that the model takes: with the checkpoint's prompt before a text to embed, or with a
    pair as one text. A pair stays as it is where the chat template takes pairs, and where the model has a head: its
    tokenizer joins the two then.

    Raises:
        BadRequestError: the request is not of the model's task, or asks for a size or a prompt that it does not have.
    """
    if isinstance(rules, EmbeddingRules):
        return _embedded(generate, rules)
    if generate.messages is None:
        return generate
    if tuple(message.role for message in generate.messages) != PAIR:
        raise BadRequestError(f"a pair to score is two messages, of the roles {' and '.join(PAIR)}", param="messages")
    if rules.tokens is None or takes_pairs(template):
        return generate
    query, document = (message.content for message in generate.messages)
    return replace(generate, messages=None, prompt=JUDGE.format(query=query, document=document))


def _embedded(generate: Generate, rules: EmbeddingRules) -> Generate:
    if generate.messages is not None:
        raise BadRequestError("a model that embeds takes no messages", param="messages")
    size = generate.dimensions
    if size is not None and not (1 <= size <= rules.size):
        raise BadRequestError(f"dimensions must be 1 to {rules.size}, not {size}", param="dimensions")
    if size is not None and rules.shorter is not None and size not in (*rules.shorter, rules.size):
        sizes = ", ".join(str(known) for known in rules.shorter)
        raise BadRequestError(f"dimensions must be one of {sizes}, not {size}", param="dimensions")
    prefix = rules.default_prompt
    if generate.prompt_name is not None:
        if generate.prompt_name not in rules.prompts:
            known = ", ".join(sorted(rules.prompts)) or "none"
            raise BadRequestError(
                f"the model has no prompt '{generate.prompt_name}'; it has {known}", param="prompt_name"
            )
        prefix = rules.prompts[generate.prompt_name]
    return generate if generate.prompt is None else replace(generate, prompt=prefix + generate.prompt)


def pooled_request(generate: Generate, prompt: tuple[int, ...], model: ModelSpec, *, tokens_max: int) -> EngineRequest:
    """The request for the engine.

    Raises:
        ContextLengthError: the prompt has more than `tokens_max` tokens.
    """
    if len(prompt) > tokens_max:
        raise ContextLengthError(
            f"the input has {len(prompt)} tokens; {model.name} takes at most {tokens_max} here", param="prompt"
        )
    return EngineRequest(
        request_id=generate.request_id,
        instance_id=generate.instance_id,
        tier=generate.tier,
        objective=generate.objective,
        prompt=prompt,
        max_tokens=1,
        cache_salt=generate.cache_salt,
        pooling=True,
        trace=current_parent(),
    )


class PooledAnswer:
    """One admitted request, as `dataplane.agent.answers.Answer`. `dimensions`: to how many numbers an embedding is cut,
    which is of length 1 again if it was before.
    """

    def __init__(
        self,
        inflight: InflightRequest,
        rules: PoolingRules,
        *,
        dimensions: int | None,
        cancel: Callable[[EngineRequest], None],
        measure: RequestMeasure,
    ) -> None:
        self._inflight = inflight
        self._rules = rules
        self._dimensions = dimensions
        self._cancel = cancel
        self._measure = measure

    @property
    def request_id(self) -> str:
        return self._inflight.request.request_id

    def close(self) -> None:
        """Cancel the request, if it runs."""
        self._cancel(self._inflight.request)
        self._measure.ended("abort")

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Started, then Pooled and Finished, or Failed."""
        prompt_tokens = len(self._inflight.request.prompt)
        yield Started(prompt_tokens=prompt_tokens)
        output = await self._inflight.outputs.get()
        if isinstance(output, DataplaneError) or output.error is not None:
            yield self.fail(output if isinstance(output, DataplaneError) else DataplaneError(output.error or ""))
            return
        self._measure.ended("stop")
        yield Pooled(values=self._cut(output.values))
        yield Finished(
            finish_reason="stop",
            prompt_tokens=prompt_tokens,
            completion_tokens=0,
            cached_tokens=output.cached_tokens,
        )

    def fail(self, error: DataplaneError) -> Failed:
        """The end of an answer that goes no further."""
        self._measure.ended("error")
        return failed_event(error)

    def _cut(self, values: tuple[float, ...]) -> tuple[float, ...]:
        rules = self._rules
        if not isinstance(rules, EmbeddingRules) or self._dimensions is None or self._dimensions == len(values):
            return values
        shorter = values[: self._dimensions]
        length = math.hypot(*shorter) if rules.normalize else 1.0
        return tuple(value / length for value in shorter) if length else shorter
