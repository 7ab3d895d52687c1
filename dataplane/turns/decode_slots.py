"""On which slot a request decodes: once it is prefilled, or, where slots do both, from its first token on.

A slot that decodes the model already takes one request more at the cost of a somewhat longer step; any other slot pays
two switches in each of its rounds for it, and two slots with half of a batch each are slower than one with the whole.
So requests join their model, unless a slot stands idle, or the model's batch is as large as is good for it. Of idle
slots the one is best that ran the model last: it still has the weights.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct


class DecodeSlot(Struct, frozen=True, kw_only=True):
    """A slot that may decode the model, and its requests by model. `running_model`: whose weights it used last."""

    slot: int
    requests: Mapping[str, int]
    running_model: str | None = None


def choose_decode_slot(model: str, slots: Iterable[DecodeSlot], *, batch_max: int) -> int:
    """An idle slot; else one that decodes the model, for fewer than `batch_max` requests; else that with the shortest
    round: the fewest models, then the fewest requests. Of slots with as many models, one that ran this one last.

    Raises:
        ValueError: there are no slots.
    """

    def cost(each: DecodeSlot) -> tuple[int, int, bool, int, int]:
        mine = each.requests.get(model, 0)
        preferred = 0 if not each.requests else 1 if 0 < mine < batch_max else 2
        elsewhere = each.running_model != model
        return preferred, len(each.requests) + (not mine), elsewhere, sum(each.requests.values()), each.slot

    return min(slots, key=cost).slot
