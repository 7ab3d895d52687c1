"""Answers of models that do not generate: an embedding or a score, from the final states of a prompt's tokens.

A prompt may be computed in several chunks, so a mean is summed up over them. What was summed belongs to the sequence's
KV: if that is dropped, the prompt starts over, and so does the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize

from dataplane.checkpoints.pooling import EmbeddingRules, read_embedding_rules, read_score_rules
from dataplane.engines.torch.model.runner import run_chunks, run_states
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.protocol.errors import ModelLoadError

Pooled = dict[int, tuple[float, ...]]
"""By the index of a chunk that completes its prompt: the answer; empty where it is not of numbers."""


class Pooler(Protocol):
    """Runs prompts of one model that does not generate."""

    def run(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> Pooled:
        """Run the chunks' tokens through the model, filling their KV blocks; `cache` is `KvStep.cache`."""


def make_pooler(skeleton: Skeleton, folder: Path) -> Pooler | None:
    """The pooler of a checkpoint by its files; None for a model that generates.

    Raises:
        ModelLoadError: its files ask for something that is not supported.
    """
    if skeleton.task == "generate":
        return None
    if skeleton.task == "embed":
        return EmbeddingPooler(read_embedding_rules(folder))
    rules = read_score_rules(folder)
    if rules.tokens is None:
        return HeadPooler(sigmoid=rules.sigmoid)
    return TokenPairPooler(*(_token_id(folder, token) for token in rules.tokens))


@dataclass(frozen=True, kw_only=True)
class _Partial:
    """What the first `tokens` tokens of a prompt give: the sum of their states, or the first one."""

    tokens: int
    state: torch.Tensor


class EmbeddingPooler:
    """Embeds: one vector of each prompt, by the rules of the checkpoint."""

    def __init__(self, rules: EmbeddingRules) -> None:
        self._rules = rules
        self._partial: WeakKeyDictionary[TokenSequence, _Partial] = WeakKeyDictionary()

    def run(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> Pooled:
        """See `Pooler.run`."""
        states = run_states(skeleton, cache, chunks)
        vectors = [self._vector(chunk, state.float()) for chunk, state in zip(chunks, states, strict=True)]
        done = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        return _answers(done, torch.stack([vectors[index] for index in done])) if done else {}

    def _vector(self, chunk: Chunk, states: torch.Tensor) -> torch.Tensor:
        """The embedding `[size]` of a prompt up to the end of a chunk with the states `[count, size]`."""
        if self._rules.pooled == "last":
            vector = states[-1]
        else:
            vector = self._extended(chunk, states)
            if self._rules.pooled == "mean":
                vector = vector / chunk.end
        return normalize(vector, dim=-1) if self._rules.normalize else vector

    def _extended(self, chunk: Chunk, states: torch.Tensor) -> torch.Tensor:
        is_mean = self._rules.pooled == "mean"
        state = states.sum(dim=0) if is_mean else states[0]
        if chunk.sequence.cached:
            partial = self._partial.get(chunk.sequence)
            if partial is None or partial.tokens != chunk.sequence.cached:
                raise RuntimeError(f"the states of the first {chunk.sequence.cached} tokens were not pooled")
            state = partial.state + state if is_mean else partial.state
        self._partial[chunk.sequence] = _Partial(tokens=chunk.end, state=state)
        return state


class HeadPooler:
    """Scores by a head of one output on the last token's state."""

    def __init__(self, *, sigmoid: bool) -> None:
        self._sigmoid = sigmoid

    def run(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> Pooled:
        """See `Pooler.run`."""
        states = run_states(skeleton, cache, chunks)
        done = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        if not done:
            return {}
        assert skeleton.head is not None
        with torch.inference_mode():
            scores = skeleton.head(torch.stack([states[index][-1] for index in done])).float()
        return _answers(done, scores.sigmoid() if self._sigmoid else scores)


class TokenPairPooler:
    """Scores by the probability of one of two tokens to be the next one, given that it is one of the two."""

    def __init__(self, no: int, yes: int) -> None:
        self._pair = [no, yes]

    def run(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> Pooled:
        """See `Pooler.run`."""
        logits = run_chunks(skeleton, cache, chunks)
        done = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        scores = torch.softmax(logits[done][:, self._pair], dim=-1)[:, 1:]
        return _answers(done, scores)


def _answers(indices: list[int], values: torch.Tensor) -> Pooled:
    """The rows of `values` `[len(indices), n]` by index."""
    finite = values.isfinite().all(dim=-1).tolist()
    rows = values.tolist()
    return {index: tuple(row) if good else () for index, row, good in zip(indices, rows, finite, strict=True)}


def _token_id(folder: Path, token: str) -> int:
    file = folder / "tokenizer.json"
    try:
        known = Tokenizer.from_file(str(file)).token_to_id(token)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{file} cannot be used: {error}") from error
    if known is None:
        raise ModelLoadError(f"{file} has no token {token!r}, by which a model that generates would be scored")
    return int(known)
