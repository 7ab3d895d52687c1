"""Correct the step times of profiles (Aegaeon A.2) by what nodes observe. Plans size shared pools by them.

Nodes report how long two steps of fixed size take there (`reference_steps`), each an exponentially weighted mean over
the steps that ran. A profile's model of the same step gives one ratio for prefill and one for decode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from controlplane.policies.profile_correction import CorrectionSettings, moved
from dataplane.protocol.reference_steps import DECODE_CONTEXT_TOKENS, DECODE_SEQUENCES, PREFILL_TOKENS

_PREFILL = ("prefill_base_s", "prefill_per_token_s", "prefill_per_token2_s")
_DECODE = ("decode_base_s", "decode_per_context_token_s", "decode_per_sequence_s")


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Step times of a model on a GPU type.

    Attributes:
        latency: seconds by the names of `LATENCY_FIELDS`; None: the profile has none.
        prefill_s, decode_s: of the reference steps, one for each instance that reports them.
        prefill_factor, decode_factor: in force.
        moved_s: when one of them was last changed; None: never.
    """

    latency: Mapping[str, float] | None
    prefill_s: Sequence[float] = ()
    decode_s: Sequence[float] = ()
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    moved_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepCorrection:
    """Factors on a profile's step times, and why they are these. `moved_s`: a fact of the next call."""

    prefill_factor: float
    decode_factor: float
    reason: str
    moved_s: float | None = None


def choose_step_correction(facts: StepFacts, now_s: float, settings: CorrectionSettings) -> StepCorrection:
    """The factors for the coming hour: each a limited step from the present one towards the median of what is observed,
    within the bounds.
    """
    prefill, decode = facts.prefill_factor, facts.decode_factor
    if facts.latency is None:
        reason = "the profile states no step times"
        return StepCorrection(prefill_factor=prefill, decode_factor=decode, reason=reason, moved_s=facts.moved_s)
    moved_s = facts.moved_s
    if moved_s is None or now_s - moved_s >= settings.every_s:
        prefill = _factor(prefill, facts.prefill_s, _prefill_s(facts.latency), settings)
        decode = _factor(decode, facts.decode_s, _decode_s(facts.latency), settings)
        moved_s = moved_s if (prefill, decode) == (facts.prefill_factor, facts.decode_factor) else now_s
    counts = f"{len(facts.prefill_s)} and {len(facts.decode_s)} instances"
    reason = f"prefills take {prefill:.2f} and decode steps {decode:.2f} times what is stated, by {counts}"
    return StepCorrection(prefill_factor=prefill, decode_factor=decode, reason=reason, moved_s=moved_s)


def corrected_latency(latency: Mapping[str, float], *, prefill: float, decode: float) -> dict[str, float]:
    """The step times of a profile, multiplied by their factors. What else it holds is kept."""
    factors = dict.fromkeys(_PREFILL, prefill) | dict.fromkeys(_DECODE, decode)
    return {name: factors[name] * value if name in factors else value for name, value in latency.items()}


def _factor(factor: float, observed_s: Sequence[float], stated_s: float, settings: CorrectionSettings) -> float:
    """One factor after one step; as it was where nothing is observed, or within the band."""
    if not observed_s or stated_s <= 0:
        return factor
    wanted = median(observed_s) / stated_s
    return factor if abs(wanted / factor - 1) <= settings.band else moved(factor, wanted, settings)


def _prefill_s(latency: Mapping[str, float]) -> float:
    base_s, token_s, token2_s = (latency[name] for name in _PREFILL)
    return base_s + PREFILL_TOKENS * token_s + PREFILL_TOKENS**2 * token2_s


def _decode_s(latency: Mapping[str, float]) -> float:
    base_s, token_s, sequence_s = (latency[name] for name in _DECODE)
    return base_s + DECODE_CONTEXT_TOKENS * token_s + DECODE_SEQUENCES * sequence_s
