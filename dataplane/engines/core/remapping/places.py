"""Whether KV has the memory in which the next model would be loaded while another runs (temporal sharing). Pure.

A slot whose models switch has memory for the weights of the largest model, and a *place* in which the next one is
loaded while another runs. Oneiros lends layers of models that wait; here the whole place is lent, or none of it.
Lending costs the prefetch: each slice begins with the load of its model. It gains a larger batch, where the KV of a
model's requests exceeds the KV memory, and fewer KV transfers.

The tokens of a second are estimated both ways. A slice loses some of its time and makes tokens in the rest:

    keep    it loses the KV transfers                  its batch is what fits in the KV memory
    lend    it loses the load and the KV transfers     its batch is what fits in the KV memory and the place

The time of a step grows linearly with its batch, and slices last as the scheduler has it.
"""

from dataclasses import dataclass

from dataplane.scheduling.deadlines import least_s
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.swaps import slice_load_s

GAIN_MIN = 1.1
"""By how much lending must be better, so that it begins; it ends where it is no better."""


@dataclass(frozen=True, kw_only=True)
class BatchDemand:
    """The requests of one model that decode, `sequences` of them; their KV has `kv_bytes`, wherever it is. `step_s`: a
    step of all of them; `least_step_s`: of one alone; `tbt_s`: the tightest time between tokens.
    """

    sequences: int
    kv_bytes: int
    step_s: float
    least_step_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        assert self.sequences > 0, self.sequences
        assert self.kv_bytes > 0, self.kv_bytes
        assert 0 < self.least_step_s <= self.step_s, (self.least_step_s, self.step_s)

    def tokens_per_s(self, memory_bytes: int) -> float:
        """Tokens of a second in which it decodes with so much KV memory."""
        share = min(memory_bytes / self.kv_bytes, 1.0)
        return share * self.sequences / (self.least_step_s + share * (self.step_s - self.least_step_s))


@dataclass(frozen=True, kw_only=True)
class PlaceFacts:
    """A slot whose busy models do not fit on it together. `batches`: of each model that decodes. `kv_bytes`: KV memory
    without the place, which has `place_bytes` besides the memory for the largest model. `load_s`: the longest load;
    `bytes_per_s`: of KV transfers, the slower direction. `lent`: whether the place is lent now.
    """

    batches: tuple[BatchDemand, ...]
    kv_bytes: int
    place_bytes: int
    load_s: float
    bytes_per_s: float
    lent: bool


def lends_place(facts: PlaceFacts, settings: DecodeSettings, *, forced: bool = False) -> bool:
    """Whether KV has the place in the slice that begins; `forced`: wherever all KV exceeds the KV memory."""
    if facts.place_bytes <= 0 or len(facts.batches) < 2:
        return False
    if forced:
        return sum(one.kv_bytes for one in facts.batches) > facts.kv_bytes
    keep = _tokens_per_s(facts, facts.kv_bytes, settings, exposed=False)
    lend = _tokens_per_s(facts, facts.kv_bytes + facts.place_bytes, settings, exposed=True)
    return lend > (1.0 if facts.lent else GAIN_MIN) * keep


def _tokens_per_s(facts: PlaceFacts, memory_bytes: int, settings: DecodeSettings, *, exposed: bool) -> float:
    """Tokens of a second, the mean of equally long slices of all models."""
    slices = [_of_slice(facts, one, memory_bytes, settings, exposed=exposed) for one in facts.batches]
    return sum(slices) / len(slices)


def _of_slice(
    facts: PlaceFacts, batch: BatchDemand, memory_bytes: int, settings: DecodeSettings, *, exposed: bool
) -> float:
    others = sum(one.kv_bytes for one in facts.batches) - batch.kv_bytes
    there = min(batch.kv_bytes, memory_bytes)
    moved_s = max(there + others - memory_bytes, 0) / facts.bytes_per_s
    moved_s = min(moved_s, there / facts.bytes_per_s)
    share = sum(one.step_s / one.tbt_s for one in facts.batches) if exposed else 0.0
    slice_s = least_s(slice_load_s(facts.load_s, 2 * moved_s), share, settings)
    load_s = facts.load_s if exposed else 0.0
    return batch.tokens_per_s(memory_bytes) * max(slice_s - moved_s, 0.0) / (slice_s + load_s)
