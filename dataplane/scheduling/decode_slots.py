"""The choice of the slot that decodes a request: after its prefill, or, on slots that do both, from its first token on.

A slot that decodes the model already takes one request more at the cost of a somewhat longer step; any other slot pays
two switches in each of its rounds for it, and two slots with half of a batch each are slower than one with the whole.
So requests join their model, unless a slot is idle, or the model's batch is full. Of idle slots the best is the one
that ran the model last, which still has the weights.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct


class DecodeSlot(Struct, frozen=True, kw_only=True):
    """A slot that may decode the model, and its requests by model. `running_model`: whose weights it used last."""

    slot: int
    requests: Mapping[str, int]
    running_model: str | None = None


def choose_decode_slot(model: str, slots: Iterable[DecodeSlot], *, batch_max: int) -> int:
    """An idle slot; else one that decodes the model for fewer than `batch_max` requests; else the one with the shortest
    round: the fewest models, then the fewest requests. Of slots with as many models, one that ran this one last.

    Raises:
        ValueError: there are no slots.
    """

    def cost(each: DecodeSlot) -> tuple[int, bool, int, int]:
        models = len(each.requests) + (model not in each.requests)
        return models, each.running_model != model, sum(each.requests.values()), each.slot

    able = list(slots)
    best = [each for each in able if not each.requests]
    best = best or [each for each in able if 0 < each.requests.get(model, 0) < batch_max] or able
    return best[0].slot if len(best) == 1 else min(best, key=cost).slot
