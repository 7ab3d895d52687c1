"""Logit bias and penalties: what a request changes about the logits of single tokens.

The state of a sequence are three numbers for each token that has any, kept as arrays and advanced token by token, so
that a step costs one operation on all rows of the batch, however long the sequences are. It follows from the request
and its tokens alone: a request that continues elsewhere rebuilds it there.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from dataplane.engines.core.uploads import upload
from dataplane.engines.interface import EngineRequest


class LogitAdjustments:
    """The adjustments of one sequence. A logit x becomes y = x + bias; then y / factor if y > 0, else y * factor; and
    then that minus `penalty`.

    `factor` is the repetition penalty of tokens in prompt or answer (Keskar et al. 2019, as in transformers' and
    vLLM's), and `penalty` OpenAI's: count * frequency_penalty + (count > 0) * presence_penalty, where count is of the
    answer's tokens.
    """

    def __init__(self, request: EngineRequest, *, prompt_tokens: int, tokens_max: int) -> None:
        """`prompt_tokens`: how many of the sequence's tokens are its prompt; `tokens_max`: how many it may have."""
        self._frequency = request.frequency_penalty
        self._presence = request.presence_penalty
        self._repetition = request.repetition_penalty
        self._prompt_tokens = prompt_tokens
        self._followed = prompt_tokens if self._repetition == 1 else 0
        self._at: dict[int, int] = {}
        self._made: dict[int, int] = {}
        size = tokens_max + len(request.logit_bias)
        self._tokens = np.empty(size, dtype=np.int64)
        self._values = np.empty((3, size), dtype=np.float32)
        for token, bias in request.logit_bias:
            self._values[0, self._index(token)] = bias

    @classmethod
    def of(cls, request: EngineRequest, *, prompt_tokens: int, tokens_max: int) -> Self | None:
        """The adjustments of a request; None if it asks for none."""
        penalized = request.frequency_penalty or request.presence_penalty or request.repetition_penalty != 1
        if not penalized and not request.logit_bias:
            return None
        return cls(request, prompt_tokens=prompt_tokens, tokens_max=tokens_max)

    def follow(self, tokens: Sequence[int]) -> None:
        """Count those of the sequence's tokens that were not counted yet."""
        if not self._frequency and not self._presence and self._repetition == 1:
            return
        for token in tokens[self._followed :]:
            at = self._index(token)
            self._values[1, at] = self._repetition
            if self._followed >= self._prompt_tokens:
                count = self._made[token] = self._made.get(token, 0) + 1
                self._values[2, at] = count * self._frequency + self._presence
            self._followed += 1

    def _index(self, token: int) -> int:
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = len(self._at)
            self._tokens[at] = token
            self._values[:, at] = 0.0, 1.0, 0.0
        return at

    @property
    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens whose logits change, each once `[tokens]`."""
        return self._tokens[: len(self._at)]

    @property
    def values(self) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Bias, factor and penalty of each of them `[3, tokens]`."""
        return self._values[:, : len(self._at)]


def adjust(logits: torch.Tensor, rows: Sequence[tuple[int, LogitAdjustments]]) -> None:
    """Change rows of `logits` `[n, vocabulary]`, float32, in place, each by its adjustments."""
    if not rows:
        return
    sizes = [len(adjustments.tokens) for _, adjustments in rows]
    at = np.stack(
        (
            np.repeat([row for row, _ in rows], sizes),
            np.concatenate([adjustments.tokens for _, adjustments in rows]),
        )
    )
    values = np.concatenate([adjustments.values for _, adjustments in rows], axis=1)
    places, there = upload(logits.device, at, values)
    row, token = places.unbind()
    bias, factor, penalty = there.unbind()
    biased = logits[row, token] + bias
    logits[row, token] = torch.where(biased > 0, biased / factor, biased * factor) - penalty
