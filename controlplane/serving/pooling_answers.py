"""Answers of models that do not generate: embeddings, scores of pairs, documents by their rank. None is streamed."""

import base64
import math
import struct
import time
from collections.abc import Sequence
from operator import mul
from typing import Any

from controlplane.errors import TidepoolError
from controlplane.serving.answers import ChoiceAnswer, Renderer, sse
from controlplane.serving.fan_out import TokenUsage
from controlplane.serving.openai_answers import openai_error
from dataplane.protocol.records import RecordedEvent


class PooledRenderer(Renderer):
    """What the three shapes have in common: they have no stream."""

    def begin(self) -> bytes:
        return b""

    def events(self, choice: int, events: list[RecordedEvent]) -> bytes:
        return b""

    def end(self, usage: TokenUsage) -> bytes:
        return b""

    def failure(self, error: TidepoolError) -> bytes:
        return sse(openai_error(error))

    def scores(self, answers: Sequence[ChoiceAnswer]) -> list[float]:
        """The score of each pair: the model's own, or the cosine of the angle between two embeddings."""
        pairs = self.query.options.get("pairs")
        if pairs is None:
            return [answer.values[0] for answer in answers]
        return [_cosine(answers[left].values, answers[right].values) for left, right in pairs]


class EmbeddingRenderer(PooledRenderer):
    """OpenAI's list of embeddings, in the order of the inputs."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        is_base64 = self.query.options.get("encoding_format") == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(answer.values) if is_base64 else list(answer.values),
            }
            for index, answer in enumerate(answers)
        ]
        return {"object": "list", "data": data, "model": self.query.model, "usage": _usage(usage)}


class ScoreRenderer(PooledRenderer):
    """vLLM's list of scores, in the order of the pairs."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        return {
            "id": f"score-{self.answer_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self.query.model,
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores(answers))
            ],
            "usage": _usage(usage),
        }


class RerankRenderer(PooledRenderer):
    """The documents by their relevance, the most relevant first; of equal ones the first given."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        options = self.query.options
        scores = self.scores(answers)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: options.get("top_n")]
        documents = options.get("documents")
        results: list[dict[str, Any]] = []
        for index in best:
            document = {} if documents is None else {"document": {"text": documents[index]}}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        return {
            "id": f"rerank-{self.answer_id}",
            "model": self.query.model,
            "results": results,
            "usage": _usage(usage),
        }


def _usage(usage: TokenUsage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    lengths = math.hypot(*left) * math.hypot(*right)
    return math.fsum(map(mul, left, right)) / lengths if lengths else 0.0
