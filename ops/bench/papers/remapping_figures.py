"""What came of requests on a shared slot, as the paper's figures count it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ops.bench.papers.remapping_memory import Counts, SharedSettings
from ops.bench.papers.remapping_models import SharedModel
from ops.bench.papers.remapping_slot import SharedSlot
from ops.bench.papers.remapping_tenants import Ask


@dataclass(frozen=True, kw_only=True)
class SharedFigures:
    """`tokens_per_s`: answers' tokens, from time 0 to the last one. `tbt_*`: of all times between two tokens;
    `tpot_*`: of each request's mean time between its tokens, in which a request that was driven out weighs as one.
    `step_p99_s`: of the decode steps, each as often as it made tokens: what `tbt_p99_s` has more is prefills, turns of
    other models and the time without KV. `batch_mean`: over the time of decode steps. `counts`: what was done for want
    of memory.
    """

    tokens_per_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    step_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    batch_mean: float
    batch_peak: int
    counts: Counts


def measure(
    models: Sequence[SharedModel], asks: Sequence[Ask], settings: SharedSettings, *, skip: int = 0
) -> SharedFigures:
    """Serve requests, which are used up, to the end. Of the first `skip` no TPOT and TTFT are counted."""
    slot = SharedSlot(models, settings)
    slot.serve(asks)
    gaps = [gap for tenant in slot.tenants for gap in tenant.gaps_s]
    counted = asks[skip:]
    tpots = [((ask.last_s - ask.first_s) / (ask.output_tokens - 1), 1) for ask in counted if ask.output_tokens > 1]
    decode_s = sum(took_s for took_s, _ in slot.steps_s)
    ttfts = [(ask.first_s - ask.arrived_s, 1) for ask in counted]
    return SharedFigures(
        tokens_per_s=sum(ask.output_tokens for ask in asks) / slot.now_s,
        tbt_p50_s=_percentile(gaps, 50),
        tbt_p99_s=_percentile(gaps, 99),
        step_p99_s=_percentile(slot.steps_s, 99),
        tpot_p50_s=_percentile(tpots, 50),
        tpot_p99_s=_percentile(tpots, 99),
        ttft_p50_s=_percentile(ttfts, 50),
        ttft_p99_s=_percentile(ttfts, 99),
        batch_mean=sum(took_s * batch for took_s, batch in slot.steps_s) / decode_s if decode_s else 0.0,
        batch_peak=slot.batch_peak,
        counts=slot.counts,
    )


def _percentile(times: Sequence[tuple[float, int]], percent: float) -> float:
    """The least of the times, each with its count, that so many percent do not exceed; 0 where there are none."""
    ordered = sorted(times)
    total = sum(count for _, count in ordered)
    passed = 0
    for time_s, count in ordered:
        passed += count
        if 100 * passed >= percent * total:
            return time_s
    return 0.0
