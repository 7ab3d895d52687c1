"""The order of events of one moment, and the log's hash."""

from collections.abc import Callable
from itertools import permutations
from math import inf
from typing import ClassVar

import pytest

from ops.simulator.kernel.events import Alarm, EventLog, Events, Kind


@pytest.mark.parametrize("order", list(permutations(Kind)))
def test_of_one_moment_ends_come_first_then_arrivals_then_ticks(order: tuple[Kind, ...]) -> None:
    events, ran = Events(), list[str]()

    def note(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    for kind in order:
        events.at(1.0, kind, note(kind.name))
        events.at(1.0, kind, note(f"{kind.name} again"))
    events.at(0.5, Kind.TICK, note("before"))
    while events.run(1):
        pass
    assert ran == ["before", "END", "END again", "ARRIVAL", "ARRIVAL again", "TICK", "TICK again"]
    assert events.count == 7


def test_an_event_may_ask_for_its_own_moment_but_for_none_before() -> None:
    events, ran = Events(), list[float]()
    events.at(2.0, Kind.TICK, lambda: events.at(2.0, Kind.END, lambda: ran.append(events.now_s)))
    while events.run(1):
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

    one, two, late = (1.0, 0, 1), (1.0, 1, 1), (2.0, 0, 1)
    assert digest(one, two) == digest(one, two)
    assert len({digest(one, two), digest(two, one), digest(one), digest(one, (1.0, 1, 2))}) == 4
    assert digest(late, one) == digest(one, late), "moments count in their own order"


def test_an_alarm_rings_wherever_something_ends_and_never_in_vain() -> None:
    events, told = Events(), list[float]()

    class Clocked:
        """Something ends there at each of these moments."""

        ends_s: ClassVar = [1.0, 2.0, 2.0, 5.0]

        @property
        def next_s(self) -> float:
            return self.ends_s[0] if self.ends_s else inf

        def advance(self, now_s: float) -> None:
            told.append(now_s)
            while self.next_s <= now_s:
                self.ends_s.pop(0)

    clocked = Clocked()
    alarm = Alarm(clocked, events)
    alarm.set()
    events.run_before(3.0, Kind.ARRIVAL)
    clocked.ends_s.insert(0, 4.0)  # what ends has become earlier
    alarm.set()
    while events.run(1):
        pass
    assert told == [1.0, 2.0, 4.0, 5.0]
