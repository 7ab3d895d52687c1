"""Our sampling inside vLLM: what is drawn at a position depends on (seed, position), the logits and the tokens alone.

vLLM draws from a generator that advances with a request, and counts only those tokens as an answer's that it made
itself, so that one continued elsewhere would draw other tokens. Here vLLM always takes the greatest logit, and a logits
processor leaves only the token that `choose_tokens` chose. Log probabilities are vLLM's own, of the raw logits.
"""

from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from dataplane.constraints.matcher import Matcher
from dataplane.engines.core.adjustments import LogitAdjustments
from dataplane.engines.core.sampler import allowed_tokens, choose_tokens, draw_of
from dataplane.engines.core.scores import LOGPROB_MIN
from dataplane.engines.interface import EngineRequest, TokenScore

_KEY = "tidepool"


_MATCHERS: WeakValueDictionary[int, Matcher] = WeakValueDictionary()
"""Of the requests that have not ended, by `id`: vLLM copies what it is given with a request."""


def sampling_params(
    request: EngineRequest, eos_ids: Sequence[int], *, left: int, matcher: Matcher | None = None
) -> SamplingParams:
    """vLLM's parameters for a request with `left` tokens to go. `matcher`: of its answer, kept by the caller."""
    if matcher is not None:
        _MATCHERS[id(matcher)] = matcher
    chosen_by_us = {
        "request": replace(request, prompt=(), generated=(), kv=None),  # vLLM copies it, and has its tokens
        "prompt_tokens": len(request.prompt),
        "eos_ids": tuple(eos_ids),
        "matcher_id": None if matcher is None else id(matcher),
    }
    return SamplingParams(
        temperature=0.0,
        max_tokens=left,
        ignore_eos=True,
        stop_token_ids=list(eos_ids) if ends_at_eos(request) else [],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        logprobs=request.logprobs,
        extra_args={_KEY: chosen_by_us} if _is_ours(request, eos_ids) else None,
    )


def ends_at_eos(request: EngineRequest) -> bool:
    """Whether an end-of-sequence token ends the answer. With a constraint it is chosen only where it has to."""
    return not request.ignore_eos or request.constraint is not None


def _is_ours(request: EngineRequest, eos_ids: Sequence[int]) -> bool:
    """Whether the greatest of the model's logits may not be the token."""
    adjusted = LogitAdjustments.of(request, prompt_tokens=0, tokens_max=0) is not None
    may_not_end = request.ignore_eos or request.min_tokens > len(request.generated)
    drawn = request.temperature > 0 or request.constraint is not None
    return adjusted or drawn or (may_not_end and len(eos_ids) > 0)


def score_of(token: int, logprobs: Mapping[int, Logprob], top: int) -> TokenScore:
    """The score of a token by vLLM's log probabilities: those of the `top` likeliest, by rank, and of `token`."""
    values = {one: max(logprob.logprob, LOGPROB_MIN) for one, logprob in logprobs.items()}
    ranked = sorted(logprobs, key=lambda one: logprobs[one].rank or 0)[:top]
    return TokenScore(logprob=values[token], top=tuple((one, values[one]) for one in ranked))


class SeededSampling(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves one token to requests that sample, have logits adjusted, or may not end yet."""

    def is_argmax_invariant(self) -> bool:
        """False: it changes which logit is the greatest."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> "_Chooser | None":
        """The processor of a request; those that take the greatest of the model's logits need none."""
        chosen_by_us = (params.extra_args or {}).get(_KEY)
        return None if chosen_by_us is None else _Chooser(**chosen_by_us)


class _Chooser:
    """Chooses the tokens of one request. vLLM makes a new one when it resumes a preempted request."""

    def __init__(
        self, *, request: EngineRequest, prompt_tokens: int, eos_ids: tuple[int, ...], matcher_id: int | None
    ) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._eos_ids = eos_ids
        tokens_max = prompt_tokens + request.max_tokens
        self._adjustments = LogitAdjustments.of(request, prompt_tokens=prompt_tokens, tokens_max=tokens_max)
        self._tokens: list[int] = []
        self._matcher = None if matcher_id is None else _MATCHERS[matcher_id]

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        """`prompt` are the tokens that vLLM was given: of the prompt, and of the answer as far as made elsewhere."""
        if not self._tokens:
            self._tokens += prompt
        self._tokens += output[len(self._tokens) - len(prompt) :]
        if self._adjustments is not None:
            self._adjustments.follow(self._tokens)
        draw = draw_of(
            self._request,
            position=len(self._tokens),
            prompt_tokens=self._prompt_tokens,
            eos_ids=self._eos_ids,
            adjustments=self._adjustments,
            allowed=None if self._matcher is None else allowed_tokens(self._matcher, self._tokens),
            must_end=self._matcher is not None and self._matcher.must_end,
        )
        (token,) = choose_tokens(logits.unsqueeze(0).clone(), [draw])
        if token is None:  # not numbers, which are passed on to vLLM, or no token is allowed, which ends the request
            return logits
        logits.fill_(float("-inf"))
        logits[token] = 0.0
        return logits
