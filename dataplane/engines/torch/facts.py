"""What the turn policy must know, gathered from the pool."""

from collections.abc import Mapping, Sequence

from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.weights import WeightStore
from dataplane.turns.decode import BatchFacts
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import SlotFacts
from dataplane.turns.tiers import TIER_TARGETS


def slot_facts(
    busy: Sequence[Pooled],
    ready: Mapping[str, bool],
    prefills: PrefillQueue,
    weights: WeightStore,
    *,
    running_model: str | None,
    now_s: float,
    decode_batch_max: int,
    prefetch: bool,
) -> SlotFacts:
    """The facts of the `busy` models: those with requests. `ready`: whether a model's weights are in some memory.

    A round pays for the switches to all of its models, unless they stay in the arena together; with `prefetch`, and
    room for any two, one comes while another decodes.
    """
    stay = weights.fit_together(pooled.model for pooled in busy)
    widest = sorted((pooled.model for pooled in busy), key=lambda model: model.skeleton.size_bytes)[-2:]
    prefetched = prefetch and weights.fit_together(widest)
    batches = (
        _batch(
            pooled,
            now_s=now_s,
            switch_s=0.0 if stay else weights.whole_s(pooled.model),
            prefetched=prefetched,
            ready=ready[pooled.name],
            batch_max=decode_batch_max,
        )
        for pooled in busy
    )
    first = {group.model: group.waiting[0].tokens for group in reversed(prefills.groups)}
    estimates = {pooled.name: pooled.estimate for pooled in busy}
    return SlotFacts(
        prefills=prefills,
        prefill_s={name: estimates[name].prefill_s(tokens, tokens**2) for name, tokens in first.items()},
        switch_s={pooled.name: weights.missing_s(pooled.model, now_s=now_s) for pooled in busy},
        batches=tuple(batch for batch in batches if batch is not None),
        running_model=running_model,
        unready=frozenset(name for name, is_ready in ready.items() if not is_ready),
    )


def _batch(
    pooled: Pooled, *, now_s: float, switch_s: float, prefetched: bool, ready: bool, batch_max: int
) -> BatchFacts | None:
    """What a model has to decode; None when nothing."""
    batch = pooled.decoding()[:batch_max]
    if not batch:
        return None
    return BatchFacts(
        model=pooled.name,
        sequences=len(batch),
        step_s=pooled.estimate.decode_s(sum(s.cached for s in batch), len(batch)),
        tbt_s=min(TIER_TARGETS[s.request.tier].tbt_s for s in batch),
        switch_s=switch_s,
        prefetched=prefetched,
        slack_s=min(s.deadline_s for s in batch) - now_s,
        ready=ready,
    )
