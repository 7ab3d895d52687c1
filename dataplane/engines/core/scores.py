"""Log probabilities of tokens under the model's own distribution."""

from collections.abc import Sequence

import numpy as np
import torch

from dataplane.engines.core.uploads import upload
from dataplane.engines.interface import TokenScore

LOGPROB_MIN = -9999.0
"""What is reported for a token that the model rules out: infinity has no JSON."""


def token_scores(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    """The scores of one token per row of `logits` `[n, vocabulary]`, and of the `tops` likeliest tokens of each row.

    `logits` are the model's, float32, before temperature, bias, penalties and masks (vLLM's "raw_logprobs").
    """
    if not tokens:
        return []
    logprobs = torch.log_softmax(logits, dim=-1).clamp_(min=LOGPROB_MIN)
    (chosen,) = upload(logits.device, np.array(tokens, dtype=np.int64)[:, None])
    largest, likeliest = logprobs.topk(min(max(tops), logprobs.shape[1]), dim=-1)
    values = torch.cat((logprobs.gather(1, chosen), largest), dim=-1).tolist()
    return [
        TokenScore(logprob=logprob, top=tuple(zip(ids[:top], largest_first[:top], strict=True)))
        for (logprob, *largest_first), ids, top in zip(values, likeliest.tolist(), tops, strict=True)
    ]
