"""Allocation and preemption on replayed memory of 100 tokens."""

from dataclasses import dataclass, field

import pytest

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.core.kv_allocator import KvAllocator
from dataplane.engines.core.pressure import Shortage
from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.replay.kv import ReplayKvMemory
from dataplane.engines.replay.models import ReplayModel, ReplaySequence, replayed
from dataplane.engines.replay.weights import WeightsMemory
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.prefill import PrefillSettings
from tests.dataplane.engines.replay.replayed import SETTINGS, FakeTime, request, spec


@dataclass
class Slot:
    """Two models, and requests of 40 tokens with KV on the device. `reclaimed`: the calls of `reclaim`."""

    host_bytes: int = 10_000
    prefill_only: bool = False
    by_deadlines: bool = False
    reclaimed: list[str | None] = field(default_factory=list)
    action: Action | None = "swap"
    shortages: list[Shortage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models: dict[str, ReplayModel] = {name: replayed(ReplayModel, spec(name), SETTINGS, 1) for name in "ab"}
        self.weights = WeightsMemory(1000)
        self.clock = FakeTime()
        self.kv = ReplayKvMemory(1000, self.host_bytes, self.clock.clock, self.weights)
        self.requests = RequestTable(self.models, self.kv, PrefillSettings(), FakeTime().clock)
        self.allocator = KvAllocator(
            self.models,
            self.kv,
            self.requests,
            prefill_only=self.prefill_only,
            reclaim=self._note,
            on_shortage=self._on_shortage,
            by_deadlines=self.by_deadlines,
        )

    def _on_shortage(self, shortage: Shortage) -> Action | None:
        self.shortages.append(shortage)
        if self.action == "remap":
            self.weights.offloaded_bytes += 500
        return self.action

    def _note(self, keep: str | None) -> bool:
        self.reclaimed.append(keep)
        return False

    def waiting(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        asked = request(request_id, prompt=40, max_tokens=20, tier=tier)
        self.requests.add(asked, self.models[model], kv_tokens_max=100)
        (sequence,) = self.requests.find([request_id])
        return sequence

    def half_prefilled(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        sequence = self.waiting(request_id, model, tier)
        assert self.allocator.grow(sequence, 41)
        sequence.cached = 16
        return sequence

    def decoding(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        sequence = self.half_prefilled(request_id, model, tier)
        sequence.cached = 40
        self.requests.take(sequence, 7)
        return sequence


@pytest.mark.parametrize("tier", ["IW-F", "NIW"])
def test_decoding_sequences_are_preempted_before_partly_prefilled_ones(tier: Tier) -> None:
    slot = Slot()
    decoding, half = slot.decoding("decoding", "a", "IW-F"), slot.half_prefilled("half", "a", "NIW")
    wanted = slot.waiting("wanted", "b", tier)
    assert not slot.allocator.grow(wanted, 41), "not before it is swapped out"
    assert (decoding.kv.location, half.kv.location) == (KvLocation.SWAPPING_OUT, KvLocation.DEVICE)
    assert (slot.allocator.preemptions_total, slot.allocator.recomputed_total) == (1, 0)


def test_a_resumed_sequence_makes_a_token_before_it_is_preempted_again() -> None:
    """Otherwise it and one that does not fit even without it would preempt each other for ever."""
    slot = Slot()
    back = slot.decoding("back", "a", "NIW")
    back.resumed_at = len(back.tokens)
    wanted = slot.waiting("wanted", "b", "IW-F")
    assert not slot.allocator.grow(wanted, 90), "not now"
    assert back.kv.location is KvLocation.DEVICE
    slot.requests.take(back, 7)
    assert not slot.allocator.grow(wanted, 90), "not before it is swapped out"
    assert back.kv.location is KvLocation.SWAPPING_OUT


def test_partly_prefilled_sequences_are_dropped_for_those_before_them_and_start_over() -> None:
    slot = Slot()
    first, last = slot.half_prefilled("first", "a", "NIW"), slot.half_prefilled("last", "a", "NIW")
    wanted = slot.waiting("wanted", "a", "IW-F")
    assert slot.allocator.grow(wanted, 41)
    assert (first.kv.location, last.kv.location, last.cached) == (KvLocation.DEVICE, KvLocation.NONE, 0)
    assert slot.models["a"].begun == [wanted, first]
    assert [one.request_id for group in slot.requests.prefills.groups for one in group.waiting].count("last") == 1
    assert (slot.allocator.preemptions_total, slot.allocator.recomputed_total) == (0, 1)


def test_a_decoding_sequence_waits_for_a_partly_prefilled_one_before_it() -> None:
    slot = Slot()
    late = slot.decoding("late", "b", "NIW")
    half = slot.half_prefilled("half", "a", "IW-F")
    assert not slot.allocator.grow(late, 61), "it is preempted itself"
    assert (late.kv.location, half.kv.location) == (KvLocation.SWAPPING_OUT, KvLocation.DEVICE)


@pytest.mark.parametrize(("decoding", "dropped"), [(False, True), (True, False)])
def test_if_nothing_decodes_the_prefill_whose_turn_it_is_goes_first(decoding: bool, dropped: bool) -> None:
    """Otherwise nothing could continue: the partly prefilled one's model may never get a turn."""
    slot = Slot()
    half = slot.half_prefilled("half", "a", "IW-F")
    other = slot.decoding("other", "b", "IW-F") if decoding else slot.half_prefilled("other", "a", "IW-F")
    wanted = slot.waiting("wanted", "b", "IW-N")
    assert slot.allocator.grow(wanted, 41) is dropped
    assert (half.kv.location, other.kv.location) == (
        KvLocation.DEVICE,
        KvLocation.NONE if dropped else KvLocation.DEVICE,
    )


def test_by_deadlines_a_prefill_waits_for_partly_prefilled_ones_before_it() -> None:
    """Their models get turns. Otherwise two models would make each other's prefills start over for ever."""
    slot = Slot(by_deadlines=True)
    halves = [slot.half_prefilled(name, "a", "IW-F") for name in ("first", "second")]
    wanted = slot.waiting("wanted", "b", "IW-N")
    assert not slot.allocator.grow(wanted, 41)
    assert [half.kv.location for half in halves] == [KvLocation.DEVICE, KvLocation.DEVICE]
    urgent = slot.waiting("urgent", "b", "IW-F")
    assert not slot.allocator.grow(urgent, 41), "it came after them"


@pytest.mark.parametrize(("prefill_only", "location"), [(False, KvLocation.NONE), (True, KvLocation.DEVICE)])
def test_kv_that_is_to_be_exported_is_not_recomputed(prefill_only: bool, location: KvLocation) -> None:
    slot = Slot(host_bytes=0, prefill_only=prefill_only)
    held = [slot.decoding(name, "a", "NIW") for name in ("one", "two")]
    wanted = slot.waiting("wanted", "b", "IW-F")
    assert slot.allocator.grow(wanted, 41) is not prefill_only
    assert [sequence.kv.location for sequence in held] == [KvLocation.DEVICE, location]


def test_borrowed_slabs_are_reclaimed_before_a_preemption_and_the_models_own_last() -> None:
    slot = Slot()
    for name in ("one", "two"):
        slot.half_prefilled(name, "a", "IW-F")
    wanted = slot.waiting("wanted", "a", "NIW")
    assert not slot.allocator.grow(wanted, 41)
    assert slot.reclaimed == ["a", None]


@pytest.mark.parametrize(
    ("action", "allocated", "location"),
    [
        ("swap", False, KvLocation.SWAPPING_OUT),
        ("recompute", True, KvLocation.NONE),
        ("refuse", False, KvLocation.DEVICE),
    ],
)
def test_the_policy_chooses_how_memory_is_freed(action: Action, allocated: bool, location: KvLocation) -> None:
    slot = Slot(action=action)
    held = [slot.decoding(name, "a", "NIW") for name in ("one", "two")]
    wanted = slot.waiting("wanted", "b", "IW-F")
    assert slot.allocator.grow(wanted, 41) is allocated
    assert [sequence.kv.location for sequence in held] == [KvLocation.DEVICE, location]
    (shortage,) = slot.shortages
    assert (shortage.sequence, shortage.tokens, shortage.victim) == (wanted, 41, held[1])


def test_nothing_is_preempted_if_the_policy_frees_memory_elsewhere() -> None:
    slot = Slot(action="remap")
    held = [slot.decoding(name, "a", "NIW") for name in ("one", "two")]
    assert slot.allocator.grow(slot.waiting("wanted", "b", "IW-F"), 41)
    assert [sequence.kv.location for sequence in held] == [KvLocation.DEVICE, KvLocation.DEVICE]
    assert slot.reclaimed == []


@pytest.mark.parametrize(("action", "location"), [("swap", KvLocation.SWAPPING_OUT), ("recompute", KvLocation.NONE)])
def test_the_last_in_order_is_preempted_itself_as_the_policy_chooses(action: Action, location: KvLocation) -> None:
    slot = Slot(action=action)
    first, last = slot.decoding("first", "a", "IW-F"), slot.decoding("last", "a", "NIW")
    assert not slot.allocator.grow(last, 61)
    assert (first.kv.location, last.kv.location) == (KvLocation.DEVICE, location)
    assert slot.shortages[0].victim is last


def test_kv_is_evicted_in_any_state() -> None:
    slot = Slot()
    decoding, half = slot.decoding("decoding", "a", "IW-F"), slot.half_prefilled("half", "b", "IW-F")
    slot.allocator.evict(lambda kv: kv is decoding.kv)
    assert (decoding.kv.location, half.kv.location) == (KvLocation.SWAPPING_OUT, KvLocation.DEVICE)
    slot.allocator.evict(lambda kv: True)
    assert (decoding.kv.location, half.kv.location, half.cached) == (KvLocation.SWAPPING_OUT, KvLocation.NONE, 0)
    assert slot.allocator.recomputed_total == 1
