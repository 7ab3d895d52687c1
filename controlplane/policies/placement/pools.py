"""What an endpoint takes of a pooled GPU: prefill, decode and switching, from its latency model and its load.

With arrivals at rate lambda and output tokens that come one per TBT target d, a request decodes for T = d x output, so
lambda T requests decode at a time (Little), and the model is active with probability p = 1 - exp(-lambda T) (Aegaeon,
Theorem 3.1: of M such models M p are). Shares of one GPU:

    prefill    lambda (c0 + a E[tokens] + b E[tokens^2])          one request at a time, as grouped FCFS runs them
    decode     (p c0 + lambda T (a context + b)) / d              a step per d while active: E[step time; batch > 0] / d
    switching  p s / round  +  s max(lambda / 8, lambda / (1 + lambda gather))

A decode switch takes s once a round while the model is active; a prefill switch once a group: requests of one model
that arrive within `gather_s` go together, at most 8. `context` is the input and, on average, half of the output.

Worked (three batches of Aegaeon 4.3): d = 0.1 s, step 0.025 s, s = 1 s, round 12 s: each always active model takes
0.25 + 1/12 of the decoding GPU, so three fill it exactly.
"""

import math
from dataclasses import dataclass, fields

GROUP_REQUESTS_MAX = 8
LATENCY_FIELDS = (
    "prefill_base_s",
    "prefill_per_token_s",
    "prefill_per_token2_s",
    "decode_base_s",
    "decode_per_context_token_s",
    "decode_per_sequence_s",
    "switch_s",
)
"""Those of `PoolLoad` that a profile knows; the others are of the requests and of the pool."""


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """One endpoint as a pool sees it: its latency model on a GPU type, and its requests.

    Attributes:
        prefill_base_s, prefill_per_token_s, prefill_per_token2_s: seconds for prompts of so many tokens, and of so many
            squared tokens (c0, a, b).
        decode_base_s, decode_per_context_token_s, decode_per_sequence_s: seconds of a step (c0, a, b).
        requests_per_s: arrival rate in the busiest window (lambda).
        input_tokens: mean of a prompt; `input_tokens2`: mean of its square, which is the mean's square where unknown.
        output_tokens: mean of an answer.
        switch_s: seconds a switch to this model takes of the GPU (s); what is prefetched costs nothing.
        tbt_s: target for the time between tokens (d).
        round_s: seconds between two turns of an active model on a decode slot.
        gather_s: seconds that a prompt may wait for others of its model.
        gpus: GPUs of a slot that can hold the model; all of them are taken.

    Raises:
        ValueError: a field is negative or not finite, or is 0 where a division needs it.
    """

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token2_s: float = 0.0
    decode_base_s: float
    decode_per_context_token_s: float
    decode_per_sequence_s: float = 0.0
    requests_per_s: float
    input_tokens: float
    input_tokens2: float | None = None
    output_tokens: float
    switch_s: float
    tbt_s: float = 0.1
    round_s: float = 12.0
    gather_s: float = 1.0
    gpus: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{each.name} must be finite and not negative, got {value}")
        for name in ("tbt_s", "round_s", "gpus"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be above 0")
        if self.input_tokens2 is not None and self.input_tokens2 < self.input_tokens**2 * (1 - 1e-9):
            raise ValueError(f"input_tokens2 must be at least input_tokens^2, got {self.input_tokens2}")


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Shares of one GPU. Above 1 in all, a single GPU cannot keep up with the endpoint."""

    prefill: float
    decode: float
    switching: float

    @property
    def total(self) -> float:
        """What the placement program takes for o_ijk."""
        return self.prefill + self.decode + self.switching


def active_probability(requests_per_s: float, service_s: float) -> float:
    """Share of time in which a model has at least one request (Aegaeon, Theorem 3.1)."""
    return -math.expm1(-requests_per_s * service_s)


def occupancy_of(load: PoolLoad) -> Occupancy:
    """What this endpoint takes of pooled GPUs; see the formulas above."""
    return occupancy_at(load, load.requests_per_s)


def occupancy_at(load: PoolLoad, rate: float) -> Occupancy:
    """The same at another arrival rate, in requests per second."""
    decoding = rate * load.tbt_s * load.output_tokens
    active = active_probability(rate, load.tbt_s * load.output_tokens)
    tokens2 = load.input_tokens**2 if load.input_tokens2 is None else load.input_tokens2
    prompt_s = load.prefill_base_s + load.prefill_per_token_s * load.input_tokens + load.prefill_per_token2_s * tokens2
    context = load.input_tokens + load.output_tokens / 2
    per_sequence_s = load.decode_per_context_token_s * context + load.decode_per_sequence_s
    step_s = active * load.decode_base_s + decoding * per_sequence_s
    groups_per_s = max(rate / GROUP_REQUESTS_MAX, rate / (1 + rate * load.gather_s))
    return Occupancy(
        prefill=load.gpus * rate * prompt_s,
        decode=load.gpus * step_s / load.tbt_s,
        switching=load.gpus * load.switch_s * (active / load.round_s + groups_per_s),
    )
