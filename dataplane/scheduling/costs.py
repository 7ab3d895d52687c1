"""Costs of a step and a switch in time: the fitted latency models of Aegaeon A.2. Pure arithmetic.

The paper's decode form ignores the batch size; measured profiles do not, so there is a term per sequence.

A mixed step runs prefill and decode in one pass. Each fit has a constant: what a pass costs whatever it computes, most
of it reading the weights. One pass pays one of them, the larger; all other terms of both fits add up, as if arithmetic
and memory traffic never overlapped.
"""

import math
from dataclasses import dataclass, fields

from msgspec import Struct
from msgspec.structs import replace

from dataplane.protocol.reference_steps import DECODE_CONTEXT_TOKENS, DECODE_SEQUENCES, PREFILL_TOKENS


class StepWork(Struct, frozen=True, kw_only=True):
    """What a step computes: prompt tokens and the growth of their squared lengths (0 without prompts), and the `batch`
    that decodes (0 without one), whose contexts hold `context_tokens` together.
    """

    tokens: int = 0
    squared_tokens: int = 0
    context_tokens: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class LatencyModel:
    """One model on one GPU type (or TP group). All coefficients are seconds (per unit) and at least 0."""

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token2_s: float
    decode_base_s: float
    decode_per_context_token_s: float
    decode_per_sequence_s: float

    def __post_init__(self) -> None:
        """Check the coefficients: a longer step must not take less time.

        Raises:
            ValueError: a coefficient is negative; the message names it.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"{field.name} must be at least 0, not {value}")

    def prefill_s(self, tokens: int, squared_tokens: int) -> float:
        """Seconds to prefill prompts of `tokens` tokens together, `squared_tokens` the sum of their squared lengths."""
        assert tokens >= 0
        assert squared_tokens >= 0
        return self.prefill_base_s + self.prefill_per_token_s * tokens + self.prefill_per_token2_s * squared_tokens

    def decode_s(self, context_tokens: int, batch: int) -> float:
        """Seconds to make one token for each of `batch` sequences whose contexts hold `context_tokens` together."""
        assert context_tokens >= 0
        assert batch >= 0
        return (
            self.decode_base_s + self.decode_per_context_token_s * context_tokens + self.decode_per_sequence_s * batch
        )

    def mixed_s(self, tokens: int, squared_tokens: int, context_tokens: int, batch: int) -> float:
        """Seconds of a step that does both, in one pass."""
        shared_s = min(self.prefill_base_s, self.decode_base_s)
        return self.prefill_s(tokens, squared_tokens) + self.decode_s(context_tokens, batch) - shared_s

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step, whichever kinds of work it does."""
        if not work.batch:
            return self.prefill_s(work.tokens, work.squared_tokens)
        if not work.tokens:
            return self.decode_s(work.context_tokens, work.batch)
        return self.mixed_s(work.tokens, work.squared_tokens, work.context_tokens, work.batch)

    def decode_pace_s(self, context_tokens: int, batch: int) -> tuple[float, float]:
        """Seconds of a decode step, and by how many more the next one takes, whose contexts are a token longer each."""
        base_s, token_s, sequences_s = (
            self.decode_base_s,
            self.decode_per_context_token_s,
            self.decode_per_sequence_s * batch,
        )
        first_s = base_s + token_s * context_tokens + sequences_s
        return first_s, base_s + token_s * (context_tokens + batch) + sequences_s - first_s


def switch_s(moved_bytes: int, bandwidth_bytes_per_s: float, efficiency: float) -> float:
    """Seconds to load `moved_bytes` of weights over the host link: bytes / (bandwidth x efficiency).

    The paper prints the product with beta = 0.625, which would exceed the bandwidth; the quotient is meant.
    """
    assert moved_bytes >= 0
    assert bandwidth_bytes_per_s > 0
    assert 0 < efficiency <= 1
    return moved_bytes / (bandwidth_bytes_per_s * efficiency)


FACTOR_MAX = 16.0
"""A correction is at most this, and at least its reciprocal."""
OUTLIER_RATIO = 2.0
"""One observation changes a factor as if it were off by at most this."""
OBSERVATION_WEIGHT = 0.1


class CostEstimate(Struct, frozen=True, kw_only=True):
    """A fitted model and its correction by observed times: one factor per kind of step. `mixed_factor`: of mixed steps,
    beyond what the other two say of their parts; such a step changes none of these.
    """

    latency: LatencyModel
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    mixed_factor: float = 1.0

    def prefill_s(self, tokens: int, squared_tokens: int) -> float:
        """Corrected `LatencyModel.prefill_s`."""
        return self.prefill_factor * self.latency.prefill_s(tokens, squared_tokens)

    def decode_s(self, context_tokens: int, batch: int) -> float:
        """Corrected `LatencyModel.decode_s`."""
        return self.decode_factor * self.latency.decode_s(context_tokens, batch)

    def mixed_s(self, tokens: int, squared_tokens: int, context_tokens: int, batch: int) -> float:
        """Corrected `LatencyModel.mixed_s`: the larger of the two corrected constants, and the terms of both."""
        prefill, decode = self.prefill_factor, self.decode_factor
        shared_s = min(prefill * self.latency.prefill_base_s, decode * self.latency.decode_base_s)
        both_s = self.prefill_s(tokens, squared_tokens) + self.decode_s(context_tokens, batch)
        return self.mixed_factor * (both_s - shared_s)

    @property
    def mixed_token_s(self) -> tuple[float, float]:
        """By how many seconds a token prefilled, and one of squared length, makes a mixed step longer."""
        factor = self.mixed_factor * self.prefill_factor
        return factor * self.latency.prefill_per_token_s, factor * self.latency.prefill_per_token2_s

    @property
    def reference_prefill_s(self) -> float | None:
        """How long the prefill of `reference_steps` takes; None: none was observed yet."""
        return None if self.prefill_factor == 1 else self.prefill_s(PREFILL_TOKENS, PREFILL_TOKENS**2)

    @property
    def reference_decode_s(self) -> float | None:
        """How long the decode step of `reference_steps` takes; None: none was observed yet."""
        return None if self.decode_factor == 1 else self.decode_s(DECODE_CONTEXT_TOKENS, DECODE_SEQUENCES)

    def observe_prefill(self, observed_s: float, tokens: int, squared_tokens: int) -> "CostEstimate":
        """The estimate after a prefill that took `observed_s`."""
        expected_s = self.prefill_s(tokens, squared_tokens)
        return replace(self, prefill_factor=_corrected(self.prefill_factor, observed_s, expected_s))

    def observe_decode(self, observed_s: float, context_tokens: int, batch: int) -> "CostEstimate":
        """The estimate after a decode step that took `observed_s`."""
        expected_s = self.decode_s(context_tokens, batch)
        return replace(self, decode_factor=_corrected(self.decode_factor, observed_s, expected_s))

    def observe_mixed(self, observed_s: float, work: StepWork) -> "CostEstimate":
        """The estimate after a step that did both and took `observed_s`."""
        expected_s = self.mixed_s(work.tokens, work.squared_tokens, work.context_tokens, work.batch)
        return replace(self, mixed_factor=_corrected(self.mixed_factor, observed_s, expected_s))


def _corrected(factor: float, observed_s: float, expected_s: float) -> float:
    """The factor corrected by an observation: an exponentially weighted mean of its logarithm."""
    assert observed_s >= 0
    if expected_s <= 0:
        return factor
    ratio = min(max(observed_s / expected_s, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
    return min(max(factor * math.pow(ratio, OBSERVATION_WEIGHT), 1 / FACTOR_MAX), FACTOR_MAX)
