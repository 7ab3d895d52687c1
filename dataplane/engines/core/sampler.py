"""From logits to tokens. What is drawn at a position depends on (seed, position) and the logits, on nothing else.

The logits of a row are changed in this order, which is vLLM's except that tokens are ruled out last (which is the same,
since no adjustment allows a token again): logit bias, repetition penalty, frequency and presence penalty; then banned
tokens and those that a mask does not allow. Temperature 0 takes the largest. Otherwise come temperature, min_p and
top_k, and top_p of what they leave.

All rows of a step are sampled together, on the device. Nothing here waits for the device except `on_host`, for the
tokens themselves: no shape depends on a value, and what the host knows arrives by `upload`.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic
from weakref import WeakKeyDictionary

import numpy as np
import torch
from msgspec import Struct

from dataplane.engines.core.adjustments import LogitAdjustments, adjust
from dataplane.engines.core.kv import KvT
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.uploads import upload
from dataplane.engines.interface import EngineRequest

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd constants of SplitMix64, as signed integers."""
_LOW_31 = 2**31 - 1
_NOISE_AT_ONCE, _CPU_NOISE_AT_ONCE = 2**24, 2**17
"""So many numbers are mixed at once, which take 8 bytes each, twice: 256 MiB, or what a CPU's cache holds."""
_PROBABILITY_BITS = range(29, 11, -1)
"""The bits of a float32 of at most 1 that decide about `top_p`: the exponent, and 11 of the 23 of the significand."""


class Draw(Struct, frozen=True, kw_only=True):
    """How to choose one token. `position`: its index in the sequence; `banned`: token ids that may not be chosen.

    `adjustments`: bias and penalties; None: none. `allowed`: a byte for each token, not 0 where it may be chosen, which
    none beyond its end may; None: all. `top_k` 0: no limit.
    """

    temperature: float
    top_p: float
    seed: int
    position: int
    top_k: int = 0
    min_p: float = 0.0
    banned: tuple[int, ...] = ()
    adjustments: LogitAdjustments | None = None
    allowed: bytes | None = None


def draw_of(
    request: EngineRequest,
    *,
    position: int,
    prompt_tokens: int,
    eos_ids: tuple[int, ...],
    adjustments: LogitAdjustments | None,
    allowed: bytes | None = None,
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
        allowed = None if matcher is None else matcher.mask(sequence.tokens)
        return draw_of(
            request,
            position=len(sequence.tokens),
            prompt_tokens=prompt_tokens,
            eos_ids=eos_ids,
            adjustments=adjustments,
            allowed=allowed,
            must_end=matcher is not None and matcher.must_end,
        )


def _keys(draws: Sequence[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    digests = [blake2b(f"{seed}:{position}".encode(), digest_size=8).digest() for seed, position in draws]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def _noise(keys: torch.Tensor, tokens: int) -> torch.Tensor:
    """Exponentially distributed numbers `[len(keys), tokens]`, float32, that only the (seed, position) of each key and
    the token id decide, the same on every device and torch version but for the last bit.
    """
    of_tokens = torch.arange(tokens, device=keys.device) * _MULTIPLIERS[0]
    made = torch.empty(len(keys), tokens, dtype=torch.float32, device=keys.device)
    rows = max(1, (_CPU_NOISE_AT_ONCE if keys.device.type == "cpu" else _NOISE_AT_ONCE) // tokens)
    for some, out in zip(torch.split(keys, rows), torch.split(made, rows), strict=True):
        mixed = some.unsqueeze(1) ^ of_tokens
        mixed *= _MULTIPLIERS[1]
        mixed ^= mixed >> 32
        mixed *= _MULTIPLIERS[2]
        out.copy_((mixed >> 32).to(torch.int32) & _LOW_31)
    return made.add_(0.5).mul_(2.0**-31).neg_().log1p_().neg_()


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """`sample_tokens` on the host; see `on_host`."""
    return on_host(sample_tokens(logits, draws))


def on_host(tokens: torch.Tensor) -> list[int | None]:
    """What `sample_tokens` returned, with None instead of -1. Waits for the device, once."""
    return [None if token < 0 else token for token in tokens.tolist()]


@torch.inference_mode()
def sample_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """One token per row of `logits` `[n, vocabulary]`, which may be changed; -1 where the row is not a number, or
    allows no token.

    A token is drawn as the winner of a race (Gumbel-max): each has noise of its own, which only (seed, position, token)
    decides. When another step batch rounds the logits differently, the winner changes only if the first two are as
    close as the rounding; inverting a cumulative distribution could change at every token's boundary.
    """
    logits = logits.float()
    adjust(logits, [(row, draw.adjustments) for row, draw in enumerate(draws) if draw.adjustments is not None])
    _ban(logits, [(row, token) for row, draw in enumerate(draws) for token in draw.banned])
    _mask(logits, [(row, draw.allowed) for row, draw in enumerate(draws) if draw.allowed is not None])
    largest, chosen = _largest(logits)
    sampled = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if len(sampled) == len(draws):
        chosen = _sample(logits, largest, draws)
    elif sampled:
        (rows,) = upload(logits.device, np.array(sampled))
        chosen[rows] = _sample(logits[rows], largest[rows], [draws[row] for row in sampled])
    return chosen.masked_fill_(largest.isnan() | (largest == float("-inf")), -1)


def _ban(logits: torch.Tensor, banned: Sequence[tuple[int, int]]) -> None:
    if banned:
        rows, tokens = upload(logits.device, *np.array(banned).T)
        logits[rows, tokens] = float("-inf")


def _mask(logits: torch.Tensor, masked: Sequence[tuple[int, bytes]]) -> None:
    if not masked:
        return
    forbidden = np.ones((len(masked), logits.shape[1]), dtype=np.bool_)
    for at, (_, allowed) in enumerate(masked):
        forbidden[at, : len(allowed)] = np.frombuffer(allowed, dtype=np.uint8) == 0
    rows, there = upload(logits.device, np.array([row for row, _ in masked]), forbidden)
    logits[rows] = logits[rows].masked_fill_(there, float("-inf"))


def _sample(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    keys, columns = upload(
        logits.device,
        _keys([(draw.seed, draw.position) for draw in draws]),
        np.array([[draw.temperature for draw in draws], [draw.min_p for draw in draws]], dtype=np.float32)[..., None],
    )
    temperature, min_p = columns.clamp_(min=0.0).unbind()
    scaled = (logits - largest.unsqueeze(1)).div_(temperature.clamp(min=torch.finfo(torch.float32).tiny))
    probabilities = torch.softmax(scaled, dim=-1)
    if any(draw.min_p or draw.top_k for draw in draws):
        _cut_unlikely(probabilities, min_p, [draw.top_k for draw in draws])
    cut = [row for row, draw in enumerate(draws) if draw.top_p < 1]
    if cut:
        top_p = np.array([[draws[row].top_p] for row in cut], dtype=np.float32)
        rows, wanted = upload(logits.device, np.array(cut), top_p)
        if len(cut) == len(draws):
            _cut_tail(probabilities, wanted)
        else:
            probabilities[rows] = _cut_tail(probabilities[rows], wanted)
    return _largest(probabilities.div_(_noise(keys, logits.shape[1])))[1]


def _largest(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, and where it is first; NaN counts as the largest. On a CPU torch takes 6 to 10 times as
    long as numpy.
    """
    if numbers.device.type != "cpu":
        values, places = numbers.max(dim=-1)
        return values, places
    places = torch.from_numpy(numbers.numpy().argmax(axis=-1))
    return numbers.gather(1, places.unsqueeze(1)).squeeze(1), places


def _cut_unlikely(probabilities: torch.Tensor, min_p: torch.Tensor, top_k: Sequence[int]) -> None:
    """Set to 0 those of `[n, vocabulary]` that are less than `min_p` times the largest, or than the `top_k`-th."""
    least = probabilities.amax(dim=-1, keepdim=True) * min_p
    limited = [(row, count) for row, count in enumerate(top_k) if 0 < count < probabilities.shape[1]]
    if limited:
        rows, counts = upload(probabilities.device, *np.array(limited).T)
        largest = probabilities[rows].topk(max(count for _, count in limited), dim=-1).values
        least[rows] = torch.maximum(least[rows], largest.gather(1, counts.unsqueeze(1) - 1))
    probabilities.masked_fill_(probabilities < least, 0.0)


def _cut_tail(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to 0 those of `[n, vocabulary]` outside of the smallest set that has `top_p` of their sum; those as likely as
    the least likely token of the set, to within 1 / 2048, stay.

    Nothing is sorted. The least likely one is the greatest probability from which on the sum is enough, and the order
    of numbers from 0 to 1 is that of their bits, which are found from the highest on.
    """
    wanted = (top_p * probabilities.sum(dim=-1, keepdim=True)).clamp_(min=torch.finfo(torch.float32).tiny)
    least = torch.zeros_like(wanted, dtype=torch.int32)
    kept = torch.empty_like(probabilities)
    for bit in _PROBABILITY_BITS:
        higher = least | (1 << bit)
        torch.ge(probabilities, higher.view(torch.float32), out=kept)
        enough = kept.mul_(probabilities).sum(dim=-1, keepdim=True) >= wanted
        least = torch.where(enough, higher, least)
    torch.ge(probabilities, least.view(torch.float32), out=kept)
    return probabilities.mul_(kept)
