"""Who makes way for whom, on replayed memory of 100 tokens."""

from dataclasses import dataclass, field

import pytest

from dataplane.engines.kv import Place
from dataplane.engines.replay_memory import ReplayKvMemory
from dataplane.engines.replay_models import ReplayModel, ReplaySequence, replayed
from dataplane.engines.request_table import RequestTable
from dataplane.engines.room import Room
from dataplane.messages import Tier
from dataplane.turns.prefill import PrefillSettings
from tests.dataplane.engines.replayed import PROFILE, FakeTime, request, spec


@dataclass
class Slot:
    """Two models, and requests of 40 tokens that hold KV here. `taken_back`: what weights were asked to give back."""

    host_bytes: int = 10_000
    hands_over: bool = False
    taken_back: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models: dict[str, ReplayModel] = {name: replayed(spec(name), PROFILE, 1, 1.0) for name in "ab"}
        self.kv = ReplayKvMemory(1000, self.host_bytes, FakeTime().clock)
        self.requests = RequestTable(self.models, self.kv, PrefillSettings(), FakeTime().clock)
        self.room = Room(self.models, self.kv, self.requests, hands_over=self.hands_over, take_back=self._note)

    def _note(self, keep: str | None) -> bool:
        self.taken_back.append(keep)
        return False

    def waiting(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        asked = request(request_id, prompt=40, max_tokens=20, tier=tier)
        self.requests.add(asked, self.models[model], kv_tokens_max=100)
        (sequence,) = self.requests.find([request_id])
        return sequence

    def half_prefilled(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        sequence = self.waiting(request_id, model, tier)
        assert self.room.grow(sequence, 41)
        sequence.cached = 16
        return sequence

    def decoding(self, request_id: str, model: str, tier: Tier) -> ReplaySequence:
        sequence = self.half_prefilled(request_id, model, tier)
        sequence.cached = 40
        self.requests.take(sequence, 7)
        return sequence


@pytest.mark.parametrize("tier", ["IW-F", "NIW"])
def test_what_decodes_makes_way_before_what_is_half_prefilled(tier: Tier) -> None:
    slot = Slot()
    decoding, half = slot.decoding("decoding", "a", "IW-F"), slot.half_prefilled("half", "a", "NIW")
    wanted = slot.waiting("wanted", "b", tier)
    assert not slot.room.grow(wanted, 41), "not before it has left"
    assert (decoding.kv.place, half.kv.place) == (Place.LEAVING, Place.HERE)
    assert (slot.room.preemptions_total, slot.room.recomputed_total) == (1, 0)


def test_half_prefilled_ones_make_way_for_those_before_them_and_begin_again() -> None:
    slot = Slot()
    first, last = slot.half_prefilled("first", "a", "NIW"), slot.half_prefilled("last", "a", "NIW")
    wanted = slot.waiting("wanted", "a", "IW-F")
    assert slot.room.grow(wanted, 41)
    assert (first.kv.place, last.kv.place, last.cached) == (Place.HERE, Place.NOWHERE, 0)
    assert slot.models["a"].begun == [wanted, first]
    assert [one.request_id for group in slot.requests.prefills.groups for one in group.waiting].count("last") == 1
    assert (slot.room.preemptions_total, slot.room.recomputed_total) == (0, 1)


def test_one_that_decodes_waits_for_a_half_prefilled_one_before_it() -> None:
    slot = Slot()
    late = slot.decoding("late", "b", "NIW")
    half = slot.half_prefilled("half", "a", "IW-F")
    assert not slot.room.grow(late, 61), "it leaves itself"
    assert (late.kv.place, half.kv.place) == (Place.LEAVING, Place.HERE)


@pytest.mark.parametrize(("decoding", "makes_way"), [(False, True), (True, False)])
def test_where_nothing_decodes_the_prefill_whose_turn_it_is_goes_first(decoding: bool, makes_way: bool) -> None:
    """Else nothing would ever go on: a turn of the half-prefilled one's model may never come."""
    slot = Slot()
    half = slot.half_prefilled("half", "a", "IW-F")
    other = slot.decoding("other", "b", "IW-F") if decoding else slot.half_prefilled("other", "a", "IW-F")
    wanted = slot.waiting("wanted", "b", "IW-N")
    assert slot.room.grow(wanted, 41) is makes_way
    assert (half.kv.place, other.kv.place) == (Place.HERE, Place.NOWHERE if makes_way else Place.HERE)


@pytest.mark.parametrize(("hands_over", "place"), [(False, Place.NOWHERE), (True, Place.HERE)])
def test_what_is_to_be_handed_over_is_not_computed_anew(hands_over: bool, place: Place) -> None:
    slot = Slot(host_bytes=0, hands_over=hands_over)
    held = [slot.decoding(name, "a", "NIW") for name in ("one", "two")]
    wanted = slot.waiting("wanted", "b", "IW-F")
    assert slot.room.grow(wanted, 41) is not hands_over
    assert [sequence.kv.place for sequence in held] == [Place.HERE, place]


def test_weights_give_back_what_they_borrowed_before_anyone_makes_way_and_the_models_own_at_last() -> None:
    slot = Slot()
    for name in ("one", "two"):
        slot.half_prefilled(name, "a", "IW-F")
    wanted = slot.waiting("wanted", "a", "NIW")
    assert not slot.room.grow(wanted, 41)
    assert slot.taken_back == ["a", None]
