"""Our sampling inside vLLM: what is drawn at a position depends on (seed, position), the logits and the tokens alone.

vLLM draws from a generator that advances with a request, and counts only those tokens as an answer's that it made
itself, so that one continued elsewhere would draw other tokens. Here vLLM always takes the greatest logit, and a logits
processor for all requests of a step leaves each only the token that `sample_tokens` chose. Log probabilities are vLLM's
own, of the raw logits.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from msgspec.structs import replace
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.constraints.matcher import Matcher
from dataplane.engines.core.adjustments import LogitAdjustments
from dataplane.engines.core.sampler import Draw, draw_of, sample_tokens
from dataplane.engines.core.scores import LOGPROB_MIN
from dataplane.engines.core.uploads import upload
from dataplane.engines.interface import EngineRequest, TokenScore

_KEY = "tidepool"

_MATCHERS: WeakValueDictionary[int, Matcher] = WeakValueDictionary()
"""Of the requests that have not ended, by `id`: vLLM copies what it is given with a request. The processes in which it
splits a model have none, and make their own.
"""


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
        "matcher_id": 0 if matcher is None else id(matcher),
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


class SeededSampling(LogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens of all requests of a step that sample, have logits adjusted, or may not end yet, and leaves
    each only that one.

    Nothing waits for the device. If vLLM schedules asynchronously, the tokens of the step before, which only penalties
    and constraints ask for, are in the outputs before `apply` is called. Where several processes run a model, each
    chooses, and all choose the same.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # vLLM's
        self._choices: dict[int, _Choices] = {}
        """By row of the batch."""
        self._vllm_config = vllm_config
        self._constraints: ConstraintCompiler | None = None

    def is_argmax_invariant(self) -> bool:
        """False: it changes which logit is the greatest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests of the batch, which vLLM adds, removes and moves."""
        process_dict_updates(self._choices, batch_update, self._choices_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` `[rows, vocabulary]`, float32, changed in place."""
        if not self._choices:
            return logits
        rows = sorted(self._choices)
        draws = [self._choices[row].next() for row in rows]
        if len(rows) == len(logits):
            return _only(sample_tokens(logits, draws), logits)
        (there,) = upload(logits.device, np.array(rows))
        mine = logits[there]
        logits[there] = _only(sample_tokens(mine, draws), mine)
        return logits

    def _choices_of(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> "_Choices | None":
        """The choices of a request; those that take the greatest of the model's logits need none."""
        chosen_by_us = (params.extra_args or {}).get(_KEY)
        if chosen_by_us is None:
            return None
        given = dict(chosen_by_us)
        matcher = self._matcher(given.pop("matcher_id"), **given)
        return _Choices(prompt or [], output, matcher=matcher, **given)

    def _matcher(
        self, matcher_id: int, *, request: EngineRequest, prompt_tokens: int, eos_ids: tuple[int, ...]
    ) -> Matcher | None:
        """What follows a request's constraint; None without one. Its engine has compiled the constraint before."""
        matcher = _MATCHERS.get(matcher_id)
        if matcher is not None or request.constraint is None:
            return matcher
        if self._constraints is None:
            model = self._vllm_config.model_config
            self._constraints = ConstraintCompiler(Path(model.model), size=model.get_vocab_size(), eos_ids=eos_ids)
        return self._constraints.matcher(request.constraint, prompt_tokens=prompt_tokens)


def _only(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`logits`, changed so that each row's greatest is its token. Where there is none, vLLM makes token 0: a constraint
    that allows no token has its `error` by then, which ends the request.
    """
    return logits.fill_(float("-inf")).scatter_(1, tokens.clamp(min=0).unsqueeze(1), 0.0)


class _Choices:
    """How the tokens of one request are chosen. vLLM makes new ones when it resumes a preempted request."""

    def __init__(
        self,
        prompt: list[int],
        output: list[int],
        *,
        request: EngineRequest,
        prompt_tokens: int,
        eos_ids: tuple[int, ...],
        matcher: Matcher | None,
    ) -> None:
        """`prompt` are the tokens that vLLM was given: of the prompt, and of the answer as far as made elsewhere;
        `output` those that it made, a list that vLLM extends.
        """
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._eos_ids = eos_ids
        tokens_max = prompt_tokens + request.max_tokens
        self._adjustments = LogitAdjustments.of(request, prompt_tokens=prompt_tokens, tokens_max=tokens_max)
        self._matcher = matcher
        self._given = len(prompt)
        self._output = output
        self._tokens = list(prompt)
        """Followed for penalties and constraints only."""

    def next(self) -> Draw:
        """How to choose the token after those that the request has."""
        if self._adjustments is not None or self._matcher is not None:
            self._tokens += self._output[len(self._tokens) - self._given :]
        if self._adjustments is not None:
            self._adjustments.follow(self._tokens)
        matcher = None if self._has_ended() else self._matcher
        return draw_of(
            self._request,
            position=self._given + len(self._output),
            prompt_tokens=self._prompt_tokens,
            eos_ids=self._eos_ids,
            adjustments=self._adjustments,
            allowed=None if matcher is None else matcher.mask(self._tokens),
            must_end=matcher is not None and matcher.must_end,
        )

    def _has_ended(self) -> bool:
        """Whether its constrained answer is at its end: vLLM, scheduling asynchronously, runs one more step of it."""
        return len(self._tokens) > self._prompt_tokens and self._tokens[-1] in self._eos_ids
