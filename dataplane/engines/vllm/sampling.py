"""Our sampling inside vLLM: what is drawn at a position depends on (seed, position) and the logits alone.

vLLM draws from a generator that advances with a request, so that one continued elsewhere would draw other tokens. Here
vLLM always takes the greatest logit, and a logits processor leaves only the token that `choose_tokens` chose.
"""

from collections.abc import Sequence

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from dataplane.engines.core.sampler import Draw, choose_tokens
from dataplane.engines.interface import EngineRequest

_KEY = "tidepool"


def sampling_params(request: EngineRequest, eos_ids: Sequence[int], *, left: int) -> SamplingParams:
    """vLLM's parameters for a request with `left` tokens to go."""
    chosen_by_us = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "banned": tuple(eos_ids) if request.ignore_eos else (),
    }
    return SamplingParams(
        temperature=0.0,
        max_tokens=left,
        ignore_eos=True,
        stop_token_ids=[] if request.ignore_eos else list(eos_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={_KEY: chosen_by_us} if request.temperature > 0 or chosen_by_us["banned"] else None,
    )


class SeededSampling(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves one token to requests that sample, and masks end-of-sequence tokens of requests that ignore them."""

    def is_argmax_invariant(self) -> bool:
        """False: it changes which logit is the greatest."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> "_Chooser | None":
        """The processor of a request; greedy ones need none."""
        chosen_by_us = (params.extra_args or {}).get(_KEY)
        return None if chosen_by_us is None else _Chooser(**chosen_by_us)


class _Chooser:
    def __init__(self, *, temperature: float, top_p: float, seed: int, banned: tuple[int, ...]) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._seed = seed
        self._banned = banned

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        draw = Draw(
            temperature=self._temperature,
            top_p=self._top_p,
            seed=self._seed,
            position=len(prompt) + len(output),
            banned=self._banned,
        )
        (token,) = choose_tokens(logits.unsqueeze(0).clone(), [draw])
        if token is None:  # not numbers: passed on to vLLM
            return logits
        logits.fill_(float("-inf"))
        logits[token] = 0.0
        return logits
