"""Compare the times to first tokens (TTFT) and between tokens (TBT) that requests had with those that the step times of
their profile predict at the load there was. Pure.

Requests arrive at an instance with GPUs of its own at lambda per second. Of a prompt of p tokens with c cached ones,
x = p - c are prefilled, and y = p^2 - c^2 is the growth of squared lengths:

    S    = c0 + a x + b y                  a prefill (Aegaeon A.2)
    rho  = lambda E[S]                     the share of the time that prefills take
    N    = lambda E[D]                     requests that decode, for D seconds each (Little's law)
    B    = 1 + N                           the batch of a request that decodes: itself and those that it meets
    step = c0' + a' B context + b' B       a decode step
    TBT  = step / (1 - rho)                decode steps have the time that prefills leave
    TTFT = lambda E[S^2] / (2 (1 - rho)) + E[S] + (1 - exp(-N)) step / 2

TTFT is the mean wait of an M/G/1 queue (Pollaczek-Khinchine), which over all tiers is the same in any order that does
not look at lengths; the prefill; and half of the decode step under way, if anything decodes. D is as it was measured,
so that only the times of steps are in question, and not how much there was to do. Windows count by their rates. As many
requests arrive as input tokens/s by the mean logged prompt, so nothing is predicted where others have many of these.

Worked: a prefill of 0.1 s whatever its length, 200 tokens/s in prompts of 100, so lambda = 2/s and rho = 0.2; D of
0.5 s, so N = 1 and B = 2; a step of 0.02 s. TBT = 0.02 / 0.8 = 0.025 s, and TTFT = 2 x 0.01 / 1.6 + 0.1 + 0.632 x 0.01
= 0.1188 s.

In simulated time, with right step times, TBT is within 7 % of this up to rho = 0.3, and TTFT at most 14 % above it, but
several times as long where prompts are prefilled beside the batch (`mixed_batches`), in the time that their objective
leaves. So TBT alone tells whether a profile is wrong, and only while prefills leave most of the time in every window.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True, kw_only=True)
class TierLatency:
    """First tokens of a tier: of how many requests, and within how many seconds half of them and 95 % had theirs."""

    requests: int
    ttft_p50_s: float
    ttft_p95_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredLatency:
    """Interactive requests of an endpoint on a GPU type: how many, and means over them.

    Attributes:
        ttft_s: seconds from when the node had a request to its first token.
        tbt_s: seconds between tokens, over all tokens; None: no request had a second one.
        decode_s: seconds from a request's first token to its last.
        prompt_tokens: of a prompt. context_tokens: of a request while it decodes, over all tokens.
        x, y: tokens that were prefilled, and the growth of squared lengths; `xx`, `yy`, `xy`: means of their products.
        tiers: first tokens by tier.
    """

    requests: int
    ttft_s: float
    tbt_s: float | None
    decode_s: float
    prompt_tokens: float
    context_tokens: float
    x: float
    y: float
    xx: float
    yy: float
    xy: float
    tiers: Mapping[str, TierLatency] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReportedLoad:
    """What instances of an endpoint on a GPU type received while the requests were logged. `rates`: input tokens/s of
    one instance, window by window; `input_tokens`: of all instances over all windows.
    """

    rates: Sequence[float] = ()
    input_tokens: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PredictedLatency:
    """Means over the requests. `prefill_share`: of an instance's time, `prefill_share_max`: in the busiest window.
    Where that reaches 1 an instance cannot keep up, and `ttft_s` and `tbt_s` are infinite.
    """

    ttft_s: float
    tbt_s: float
    batch: float
    prefill_share: float
    prefill_share_max: float


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """`requests_min`: fewer tell nothing. `ratio_max`: a TBT so many times the predicted one, or its reciprocal, is not
    what the profile says. `prefill_share_max`: above it in any window queues and full batches make TBT, and not the
    steps alone. `explained_min`: the share of the input tokens that the requests have to explain, where the share
    `logged_share` of all requests is logged.
    """

    requests_min: int = 100
    ratio_max: float = 1.5
    prefill_share_max: float = 0.4
    explained_min: float = 2 / 3
    logged_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LatencyComparison:
    """What was predicted of the measured requests, None: nothing; whether it `differs`; and why, in words."""

    predicted: PredictedLatency | None
    differs: bool
    reason: str


def compare_latency(
    measured: MeasuredLatency, load: ReportedLoad, latency: Mapping[str, float] | None, settings: ComparisonSettings
) -> LatencyComparison:
    """Whether requests took as long as their profile says. `latency`: seconds by the names of `LATENCY_FIELDS`, None:
    the profile has none.
    """

    def unknown(reason: str) -> LatencyComparison:
        return LatencyComparison(predicted=None, differs=False, reason=reason)

    if latency is None:
        return unknown("the profile states no step times")
    if load.input_tokens <= 0:
        return unknown("instances reported no load")
    explained = measured.requests * measured.prompt_tokens / load.input_tokens
    if explained < settings.explained_min * settings.logged_share:
        share = explained / settings.logged_share
        return unknown(f"other requests than the logged ones fill it: these explain {share:.0%} of its input tokens")
    predicted = predict_latency(measured, load.rates, latency)
    differs, verdict = _verdict(measured, predicted, settings)
    times = [_times_text("first tokens", measured.ttft_s, predicted.ttft_s)]
    if measured.tbt_s is not None:
        times.append(_times_text("tokens", measured.tbt_s, predicted.tbt_s))
    batches = f"{measured.requests:,} requests in batches of {predicted.batch:.1f}"
    mean, most = predicted.prefill_share, predicted.prefill_share_max
    shares = f"prefills take {mean:.0%} of the time and at most {most:.0%} of a window"
    return LatencyComparison(
        predicted=predicted, differs=differs, reason=f"{verdict}: {', '.join(times)}; {batches}, {shares}"
    )


def predict_latency(
    measured: MeasuredLatency, rates: Sequence[float], latency: Mapping[str, float]
) -> PredictedLatency:
    """The formulas above. `rates`: as in `ReportedLoad`, at least one above 0."""
    base_s, token_s, token2_s = (latency[f"prefill_{name}"] for name in ("base_s", "per_token_s", "per_token2_s"))
    prefill_s = base_s + token_s * measured.x + token2_s * measured.y
    products = base_s * token_s * measured.x + base_s * token2_s * measured.y + token_s * token2_s * measured.xy
    squared = base_s**2 + token_s**2 * measured.xx + token2_s**2 * measured.yy + 2 * products
    sequence_s = latency["decode_per_context_token_s"] * measured.context_tokens + latency["decode_per_sequence_s"]

    def times(arrivals_per_s: float) -> tuple[float, float, float, float]:
        share, decoding = arrivals_per_s * prefill_s, arrivals_per_s * measured.decode_s
        step_s = latency["decode_base_s"] + (1 + decoding) * sequence_s
        if share >= 1:
            return math.inf, math.inf, 1 + decoding, share
        wait_s = arrivals_per_s * squared / (2 * (1 - share)) - math.expm1(-decoding) * step_s / 2
        return wait_s + prefill_s, step_s / (1 - share), 1 + decoding, share

    arrivals = [rate / measured.prompt_tokens for rate in rates if rate > 0]
    columns = list(zip(*map(times, arrivals), strict=True))
    ttft_s, tbt_s, batch, share = (fmean(column, arrivals) for column in columns)
    share_max = max(columns[-1])
    return PredictedLatency(ttft_s=ttft_s, tbt_s=tbt_s, batch=batch, prefill_share=share, prefill_share_max=share_max)


def _verdict(measured: MeasuredLatency, predicted: PredictedLatency, settings: ComparisonSettings) -> tuple[bool, str]:
    """Whether the profile's decode steps are wrong, and the beginning of the reason."""
    if measured.requests < settings.requests_min:
        return False, "too few requests to tell"
    if predicted.prefill_share_max > settings.prefill_share_max:
        return False, "too loaded to tell"
    if measured.tbt_s is not None and measured.tbt_s > settings.ratio_max * predicted.tbt_s:
        return True, "decode is slower than the profile says"
    if measured.tbt_s is not None and measured.tbt_s * settings.ratio_max < predicted.tbt_s:
        return True, "decode is faster than the profile says"
    return False, "as the profile says"


def _times_text(what: str, measured_s: float, predicted_s: float) -> str:
    if math.isinf(predicted_s):
        return f"{what} after {1000 * measured_s:,.1f} ms where the profile says that an instance cannot keep up"
    ratio = f" ({measured_s / predicted_s:.2f} x)" if predicted_s else ""
    return f"{what} after {1000 * measured_s:,.1f} ms and by the profile after {1000 * predicted_s:,.1f} ms{ratio}"
