"""Where a request decodes."""

import pytest

from dataplane.scheduling.decode_slots import DecodeSlot, choose_decode_slot


def chosen(*slots: dict[str, int], batch_max: int = 4, running: tuple[str, ...] = ()) -> int:
    """`running`: the models that the first slots ran last."""
    facts = [
        DecodeSlot(slot=number, requests=requests, running_model=running[number] if number < len(running) else None)
        for number, requests in enumerate(slots)
    ]
    return choose_decode_slot("tide", facts, batch_max=batch_max)


def test_an_idle_slot_is_taken_first() -> None:
    assert chosen({"tide": 1}, {}, {}) == 1


def test_of_idle_slots_the_one_that_has_the_weights() -> None:
    assert chosen({}, {}, {}, running=("ebb", "flood", "tide")) == 2
    assert chosen({"ebb": 1}, {"ebb": 9, "flood": 1}, {}, running=("ebb", "tide", "ebb")) == 2, "an idle one is better"


def test_a_request_joins_its_model_although_the_round_is_longer_there() -> None:
    assert chosen({"ebb": 1}, {"tide": 3, "ebb": 9, "flood": 9}) == 1
    assert chosen({"tide": 1, "ebb": 1}, {"tide": 2}) == 1, "of two that decode it, that with the shorter round"


def test_a_batch_that_is_large_enough_is_left_alone() -> None:
    assert chosen({"ebb": 1}, {"tide": 4}) == 1, "a second model there is worse than a longer step here"
    assert chosen({"ebb": 1}, {"tide": 4, "flood": 2, "neap": 1}) == 0


def test_without_its_model_the_shortest_round_then_the_fewest_requests() -> None:
    assert chosen({"ebb": 1, "flood": 1}, {"ebb": 5}) == 1
    assert chosen({"ebb": 5}, {"ebb": 2}) == 1
    assert chosen({"ebb": 2}, {"flood": 2}) == 0


def test_there_must_be_a_slot() -> None:
    with pytest.raises(ValueError, match="empty"):
        chosen()
