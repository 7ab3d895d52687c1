"""From logits to tokens. What is drawn at a position depends on (seed, position) and the logits, on nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How to choose one token. `position`: its index in the sequence; `banned`: token ids that may not be chosen."""

    temperature: float
    top_p: float
    seed: int
    position: int
    banned: tuple[int, ...] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only (seed, position) decides, the same on every device and torch version."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token per row of `logits` `[n, vocabulary]`; None where the row is not a number.

    Temperature 0 takes the largest logit. Otherwise softmax at that temperature, cut to the smallest set of tokens
    whose probability reaches `top_p`, drawn by inverting the cumulative distribution in the order of token ids. An
    order by probability would swap near-equal tokens when another step batch rounds the logits differently.
    """
    logits = logits.float()
    for row, draw in enumerate(draws):
        if draw.banned:
            logits[row, list(draw.banned)] = float("-inf")
    chosen = logits.argmax(dim=-1)
    sampled = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        chosen[rows] = _sample(logits[rows], [draws[row] for row in sampled])
    broken = logits.isnan().any(dim=-1).tolist()
    return [None if bad else token for bad, token in zip(broken, chosen.tolist(), strict=True)]


def _sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / column([draw.temperature for draw in draws])
    probabilities = _cut(torch.softmax(scaled, dim=-1), column([draw.top_p for draw in draws]))
    cumulative = probabilities.cumsum(dim=-1)
    points = column([uniform(draw.seed, draw.position) for draw in draws]) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def _cut(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, tokens = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    outside[:, 0] = False
    return probabilities.masked_fill(outside.scatter(1, tokens, outside), 0.0)
