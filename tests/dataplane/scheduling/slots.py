"""Slots to choose a turn for: what waits and what decodes on one that holds one model at a time."""

from collections.abc import Sequence

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.decode import BatchFacts
from dataplane.scheduling.prefill import PrefillQueue, PrefillRequest, PrefillSettings
from dataplane.scheduling.schedule import SlotFacts, TurnSettings
from dataplane.scheduling.tiers import TIER_OBJECTIVES

SETTINGS = TurnSettings(near_s=0.25, burst_s=1.0, prefill=PrefillSettings(order="fcfs"))
SWITCH_S, PREFILL_S, STEP_S = 0.5, 0.2, 0.05


def batch(model: str, slack_s: float = 0.0, *, ready: bool = True) -> BatchFacts:
    return BatchFacts(
        model=model, sequences=1, step_s=STEP_S, tbt_s=0.1, switch_s=SWITCH_S, slack_s=slack_s, ready=ready
    )


def prefills(*entries: tuple[str, float, Tier]) -> PrefillQueue:
    """(model, arrived_s, tier); ids are the model and a number."""
    queue = PrefillQueue()
    for index, (model, arrived_s, tier) in enumerate(entries):
        request = PrefillRequest(
            request_id=f"{model}{index}",
            model=model,
            tokens=100,
            tier=tier,
            arrived_s=arrived_s,
            ttft_s=TIER_OBJECTIVES[tier].ttft_s,
        )
        queue = queue.join(request, SETTINGS.prefill)
    return queue


def slot(
    queue: PrefillQueue, batches: Sequence[BatchFacts], running: str | None, unready: Sequence[str] = ()
) -> SlotFacts:
    """A slot that holds one model at a time."""
    models = {group.model for group in queue.groups} | {one.model for one in batches}
    return SlotFacts(
        prefills=queue,
        prefill_s=dict.fromkeys(models, PREFILL_S),
        switch_s={model: 0.0 if model == running else SWITCH_S for model in models},
        load_s=dict.fromkeys(models, SWITCH_S),
        batches=tuple(batches),
        running_model=running,
        unready=frozenset(unready),
    )
