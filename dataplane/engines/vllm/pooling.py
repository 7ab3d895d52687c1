"""Embeddings and scores by vLLM's pooling runner. vLLM pools the states by the checkpoint's files, as the torch engine
does; what follows (normalization, sigmoid) is done here, so that both engines follow the same rules.
"""

import math
from pathlib import Path

import torch
from torch.nn.functional import normalize
from vllm import PoolingParams

from dataplane.checkpoints.pooling import EmbeddingRules, ScoreRules, read_embedding_rules, read_score_rules
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

PoolingRules = EmbeddingRules | ScoreRules


def read_rules(folder: Path, task: Task) -> PoolingRules | None:
    """The rules of a checkpoint's answers; None for a model that generates.

    Raises:
        ModelLoadError: its files ask for something that is not supported, on vLLM.
    """
    if task == "generate":
        return None
    if task == "embed":
        return read_embedding_rules(folder)
    rules = read_score_rules(folder)
    if rules.tokens is not None:
        raise ModelLoadError(f"{folder}: vLLM scores by a head here; engine torch scores by two tokens")
    return rules


def pooling_params(rules: PoolingRules) -> PoolingParams:
    """vLLM's parameters of a request: pooled states, as they are."""
    return PoolingParams(task="embed" if isinstance(rules, EmbeddingRules) else "classify", use_activation=False)


def answer_of(pooled: torch.Tensor, rules: PoolingRules) -> tuple[float, ...]:
    """The values of an answer; empty where the states `[size]` are not numbers."""
    values = pooled.float().flatten()
    if isinstance(rules, ScoreRules):
        values = values.sigmoid() if rules.sigmoid else values
    elif rules.normalize:
        values = normalize(values, dim=-1)
    made = tuple(values.tolist())
    return made if all(math.isfinite(value) for value in made) else ()
