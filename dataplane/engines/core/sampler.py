"""From logits to tokens. What is drawn at a position depends on (seed, position) and the logits, on nothing else.

The logits of a row are changed in this order, which is vLLM's except that tokens are ruled out last (which is the same,
since no adjustment allows a token again): logit bias, repetition penalty, frequency and presence penalty; then banned
tokens and those that a mask does not allow. Temperature 0 takes the largest. Otherwise come temperature, min_p and
top_k, and top_p of what they leave.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic
from weakref import WeakKeyDictionary

import torch
from msgspec import Struct

from dataplane.constraints.matcher import Matcher
from dataplane.engines.core.adjustments import LogitAdjustments, adjust
from dataplane.engines.core.kv import KvT
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.interface import EngineRequest

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd constants of SplitMix64, as signed integers."""
_LOW_31 = 2**31 - 1
_SORTED_TOKENS = 1024
"""Of so many tokens, the likeliest, most rows find the set of `top_p` in."""


class Draw(Struct, frozen=True, kw_only=True):
    """How to choose one token. `position`: its index in the sequence; `banned`: token ids that may not be chosen.

    `adjustments`: bias and penalties; None: none. `allowed`: bool, `[tokens]`, which tokens may be chosen, none beyond
    its end; None: all. `top_k` 0: no limit.
    """

    temperature: float
    top_p: float
    seed: int
    position: int
    top_k: int = 0
    min_p: float = 0.0
    banned: tuple[int, ...] = ()
    adjustments: LogitAdjustments | None = None
    allowed: torch.Tensor | None = None


def draw_of(
    request: EngineRequest,
    *,
    position: int,
    prompt_tokens: int,
    eos_ids: tuple[int, ...],
    adjustments: LogitAdjustments | None,
    allowed: torch.Tensor | None = None,
    must_end: bool = False,
) -> Draw:
    """How a request chooses the token at a position. The end of sequence is banned before `min_tokens` tokens, unless
    the request's constraint allows nothing else: then it `must_end`.
    """
    may_not_end = request.ignore_eos or position - prompt_tokens < request.min_tokens
    return Draw(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        position=position,
        top_k=request.top_k,
        min_p=request.min_p,
        banned=eos_ids if may_not_end and not must_end else (),
        adjustments=adjustments,
        allowed=allowed,
    )


class SequenceDraws(Generic[KvT]):
    """The draws of sequences, whose adjustments it keeps for as long as they live."""

    def __init__(self) -> None:
        self._adjustments: WeakKeyDictionary[TokenSequence[KvT], LogitAdjustments | None] = WeakKeyDictionary()

    def next(self, sequence: TokenSequence[KvT], eos_ids: tuple[int, ...]) -> Draw:
        """How to choose the token after those that a sequence has."""
        request = sequence.request
        prompt_tokens = len(request.prompt)
        try:
            adjustments = self._adjustments[sequence]
        except KeyError:
            tokens_max = prompt_tokens + request.max_tokens
            adjustments = LogitAdjustments.of(request, prompt_tokens=prompt_tokens, tokens_max=tokens_max)
            self._adjustments[sequence] = adjustments
        if adjustments is not None:
            adjustments.follow(sequence.tokens)
        matcher = sequence.matcher
        allowed = None if matcher is None else allowed_tokens(matcher, sequence.tokens)
        return draw_of(
            request,
            position=len(sequence.tokens),
            prompt_tokens=prompt_tokens,
            eos_ids=eos_ids,
            adjustments=adjustments,
            allowed=allowed,
            must_end=matcher is not None and matcher.must_end,
        )


def allowed_tokens(matcher: Matcher, tokens: Sequence[int]) -> torch.Tensor:
    """Which tokens of the vocabulary may follow a prompt and answer: bool, `[vocabulary]`."""
    return torch.frombuffer(bytearray(matcher.mask(tokens)), dtype=torch.uint8).bool()


def noise(draws: Sequence[tuple[int, int]], tokens: int, device: torch.device) -> torch.Tensor:
    """Exponentially distributed numbers `[len(draws), tokens]`, float32, that only (seed, position) of each draw and
    the token id decide, the same on every device and torch version but for the last bit.
    """
    keys = [blake2b(f"{seed}:{position}".encode(), digest_size=8).digest() for seed, position in draws]
    signed = [int.from_bytes(key, "little", signed=True) for key in keys]
    mixed = torch.tensor(signed, device=device).unsqueeze(1) ^ torch.arange(tokens, device=device) * _MULTIPLIERS[0]
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> 32
    mixed *= _MULTIPLIERS[2]
    chances = ((mixed >> 32).to(torch.int32) & _LOW_31).float().add_(0.5).mul_(2.0**-31)
    return chances.neg_().log1p_().neg_()


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token per row of `logits` `[n, vocabulary]`, which may be changed; None where the row is not a number, or
    allows no token.

    A token is drawn as the winner of a race (Gumbel-max): each has noise of its own, which only (seed, position, token)
    decides. When another step batch rounds the logits differently, the winner changes only if the first two are as
    close as the rounding; inverting a cumulative distribution could change at every token's boundary.
    """
    logits = logits.float()
    adjust(logits, [(row, draw.adjustments) for row, draw in enumerate(draws) if draw.adjustments is not None])
    _rule_out(logits, draws)
    largest, chosen = logits.max(dim=-1)
    sampled = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        chosen[rows] = _sample(logits[rows], largest[rows], [draws[row] for row in sampled])
    broken = (largest.isnan() | (largest == float("-inf"))).tolist()
    return [None if bad else token for bad, token in zip(broken, chosen.tolist(), strict=True)]


def _rule_out(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    banned = [(row, token) for row, draw in enumerate(draws) for token in draw.banned]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).unbind(dim=1)
        logits[rows, tokens] = float("-inf")
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            known = len(draw.allowed)
            logits[row, :known].masked_fill_(~draw.allowed.to(logits.device), float("-inf"))
            logits[row, known:] = float("-inf")


def _sample(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    scaled = (logits - largest.unsqueeze(1)).double() / column([draw.temperature for draw in draws])
    probabilities = torch.softmax(scaled, dim=-1)
    if any(draw.min_p or draw.top_k for draw in draws):
        _cut_unlikely(probabilities, column([draw.min_p for draw in draws]), [draw.top_k for draw in draws])
    cut = [row for row, draw in enumerate(draws) if draw.top_p < 1]
    if cut:
        rows = torch.tensor(cut, device=logits.device) if len(cut) < len(draws) else slice(None)
        probabilities[rows] = _nucleus(probabilities[rows], column([draws[row].top_p for row in cut]))
    race = noise([(draw.seed, draw.position) for draw in draws], logits.shape[1], logits.device)
    return (probabilities / race).argmax(dim=-1)


def _cut_unlikely(probabilities: torch.Tensor, min_p: torch.Tensor, top_k: Sequence[int]) -> None:
    """Set to 0 those of `[n, vocabulary]` that are less than `min_p` times the largest, or than the `top_k`-th."""
    least = probabilities.amax(dim=-1, keepdim=True) * min_p
    limited = [row for row, count in enumerate(top_k) if 0 < count < probabilities.shape[1]]
    if limited:
        rows = torch.tensor(limited, device=probabilities.device)
        counts = torch.tensor([top_k[row] for row in limited], device=probabilities.device).unsqueeze(1)
        largest = probabilities[rows].topk(max(top_k[row] for row in limited), dim=-1).values
        least[rows] = torch.maximum(least[rows], largest.gather(1, counts - 1))
    probabilities.masked_fill_(probabilities < least, 0.0)


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`probabilities` `[n, vocabulary]` with 0 for tokens outside of the smallest set that has `top_p` of their sum;
    those as likely as the least likely token of the set stay. Few rows need all their tokens sorted for that.
    """
    wanted = top_p * probabilities.sum(dim=-1, keepdim=True)
    size = probabilities.shape[1]
    few = min(_SORTED_TOKENS, size)
    largest = probabilities.topk(few, dim=-1).values
    cumulative = largest.cumsum(dim=-1)
    least = _least_inside(largest, cumulative, wanted)
    if few < size:
        (short,) = torch.nonzero(cumulative[:, -1] < wanted[:, 0], as_tuple=True)
        if len(short):
            ordered = probabilities[short].sort(dim=-1, descending=True).values
            least[short] = _least_inside(ordered, ordered.cumsum(dim=-1), wanted[short])
    return probabilities.masked_fill(probabilities < least, 0.0)


def _least_inside(ordered: torch.Tensor, cumulative: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The last of the probabilities, the largest first, before which the sum is less than wanted `[n, 1]`."""
    inside = (cumulative - ordered < wanted).sum(dim=-1, keepdim=True)
    return ordered.gather(1, (inside - 1).clamp_(min=0))
