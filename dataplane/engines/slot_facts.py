"""What the turn policy must know of a slot, gathered from its models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.engines.served_models import ServedModel
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import SlotFacts


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What switches to the models that have work cost, by model. `missing_s`: from now; `round_s`: in each round of
    decode turns. `prefetched`: one comes while another decodes. `unready`: models whose weights are in no memory yet.
    """

    missing_s: Mapping[str, float]
    round_s: Mapping[str, float]
    prefetched: bool
    unready: frozenset[str]


def slot_facts(
    busy: Sequence[ServedModel[Any]],
    switches: Switches,
    prefills: PrefillQueue,
    *,
    running_model: str | None,
    now_s: float,
    decode_batch_max: int,
) -> SlotFacts:
    """The facts of the `busy` models, those with requests. Of each at most `decode_batch_max` sequences decode."""
    batches = (
        model.batch_facts(
            now_s=now_s,
            switch_s=switches.round_s[model.name],
            prefetched=switches.prefetched,
            ready=model.name not in switches.unready,
            batch_max=decode_batch_max,
        )
        for model in busy
    )
    return SlotFacts(
        prefills=prefills,
        prefill_s=_next_prefills_s(busy, prefills),
        switch_s=switches.missing_s,
        batches=tuple(batch for batch in batches if batch is not None),
        running_model=running_model,
        unready=switches.unready,
    )


def _next_prefills_s(busy: Iterable[ServedModel[Any]], prefills: PrefillQueue) -> dict[str, float]:
    """By model, the estimate for the next request of its front group."""
    estimates = {model.name: model.estimate for model in busy}
    first = {group.model: group.waiting[0].tokens for group in reversed(prefills.groups)}
    return {name: estimates[name].prefill_s(tokens, tokens**2) for name, tokens in first.items()}
