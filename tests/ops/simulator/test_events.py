"""The order of events of one moment, and the log's hash."""

from collections.abc import Callable
from itertools import permutations

import pytest

from ops.simulator.events import EventLog, Events, Kind


@pytest.mark.parametrize("order", list(permutations(Kind)))
def test_of_one_moment_ends_come_first_then_arrivals_then_ticks(order: tuple[Kind, ...]) -> None:
    events, ran = Events(), list[str]()

    def note(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    for kind in order:
        events.at(1.0, kind, note(kind.name))
        events.at(1.0, kind, note(f"{kind.name} again"))
    events.at(0.5, Kind.TICK, note("before"))
    while events.run_next():
        pass
    assert ran == ["before", "END", "END again", "ARRIVAL", "ARRIVAL again", "TICK", "TICK again"]
    assert events.count == 7


def test_an_event_may_ask_for_its_own_moment_but_for_none_before() -> None:
    events, ran = Events(), list[float]()
    events.at(2.0, Kind.TICK, lambda: events.at(2.0, Kind.END, lambda: ran.append(events.now_s)))
    while events.run_next():
        pass
    assert ran == [2.0]
    with pytest.raises(AssertionError):
        events.at(1.0, Kind.END, lambda: None)


def test_the_hash_knows_every_record_and_their_order() -> None:
    def digest(*records: tuple[float, int, int]) -> str:
        log = EventLog()
        for record in records:
            log.note(*record)
        assert log.noted == len(records)
        return log.digest

    one, two = (1.0, 0, 1), (1.0, 1, 1)
    assert digest(one, two) == digest(one, two)
    assert len({digest(one, two), digest(two, one), digest(one), digest(one, (1.0, 1, 2))}) == 4
