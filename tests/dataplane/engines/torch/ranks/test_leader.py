"""What rank 0 tells the others of its transfers."""

import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.ranks.commands import (
    ADAPTED,
    ARENA,
    HOST_KV,
    REPORT,
    STREAMS,
    Adapt,
    Transfer,
    read_command,
)
from dataplane.engines.torch.ranks.leader import Leader, Regions
from dataplane.engines.torch.ranks.processes import shut_down
from dataplane.memory.events import AllOf, Event, FlagEvent, Settled
from dataplane.protocol.errors import DeviceLostError


class ManualStream:
    """Its submissions end when the test says so."""

    def __init__(self) -> None:
        self.events: list[FlagEvent] = []

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        self.events.append(FlagEvent())
        return self.events[-1]

    def close(self) -> None:
        """Nothing runs."""


class Told:
    """A leader whose arena and host memory have 64 bytes each, and the other end of its one connection."""

    def __init__(self, *, exports: bool) -> None:
        ours, self.theirs = socket.socketpair()
        rank = Rank(index=0, count=2, collectives=Unconnected())
        self.leader = Leader(rank, [ours], lambda: shut_down([ours]), exports=exports)
        self.arena, self.host = (torch.zeros(64, dtype=torch.uint8) for _ in range(2))
        self.leader.regions.add(ARENA, self.arena)
        self.leader.regions.add(HOST_KV, self.host)
        self.inner = {name: ManualStream() for name in STREAMS}
        self.streams = {name: self.leader.stream(name, inner) for name, inner in self.inner.items()}
        self._commands = self.theirs.makefile("rb")

    def submit(self, name: str, at: int, after: Sequence[Event] = ()) -> tuple[Event, Transfer]:
        """A submission, and what the other rank reads of it."""
        event = self.streams[name].submit([Copy(self.host[at : at + 4], self.arena[at + 8 : at + 12])], after)
        command = read_command(self._commands)
        assert isinstance(command, Transfer)
        return event, command

    def close(self) -> None:
        self.leader.close()
        self._commands.close()
        self.theirs.close()


@pytest.fixture
def told() -> Iterator[Callable[..., Told]]:
    made: list[Told] = []

    def make(*, exports: bool = False) -> Told:
        made.append(Told(exports=exports))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_memory_is_named_by_region_and_offset(told: Callable[..., Told]) -> None:
    _, command = told().submit("kv_in", 16)
    assert (command.source, command.target, command.copies) == (HOST_KV, ARENA, ((16, 24, 4),))
    assert (command.stream, command.number, command.reported) == (STREAMS.index("kv_in"), 0, False)


def test_a_command_says_what_has_ended_on_rank_0(told: Callable[..., Told]) -> None:
    one = told()
    one.submit("kv_in", 0)
    one.submit("kv_in", 4)
    assert one.submit("kv_out", 0)[1].passed == (0, 0, 0, 0)
    one.inner["kv_in"].events[0].finish()
    assert one.submit("kv_out", 4)[1].passed == (0, 0, 1, 0)
    one.inner["kv_out"].events[1].finish()  # out of order: the first one counts too, to be safe
    assert one.submit("weights", 0)[1].passed == (0, 0, 1, 2)


def test_transfers_wait_for_those_of_other_streams_that_they_name(told: Callable[..., Told]) -> None:
    one = told()
    first, _ = one.submit("weights", 0)
    second, _ = one.submit("layers", 0)
    weights, layers = STREAMS.index("weights"), STREAMS.index("layers")
    after: list[Event] = [Settled(first), AllOf([second, FlagEvent()])]
    assert one.submit("kv_in", 0, after)[1].after == ((weights, 0), (layers, 0))
    one.inner["weights"].events[0].finish()
    assert one.submit("kv_in", 4, [Settled(first)])[1].after == (), "it has ended, as `passed` says"


def test_what_other_slots_read_has_ended_when_all_ranks_report_it(told: Callable[..., Told]) -> None:
    one = told(exports=True)
    event, command = one.submit("kv_out", 0)
    assert command.reported
    one.inner["kv_out"].events[0].finish()
    assert not event.done()
    one.theirs.sendall(REPORT.pack(command.stream, command.number))
    event.wait()
    assert event.done()


def test_a_rank_that_is_gone_is_noticed(told: Callable[..., Told]) -> None:
    one = told()
    one.theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceLostError, match="rank 1"):
        one.streams["kv_in"].submit([Copy(one.host[:4], one.arena[:4])])


def test_a_rank_that_ends_without_an_answer_is_noticed(told: Callable[..., Told]) -> None:
    one = told()
    one.theirs.sendall(REPORT.pack(ADAPTED, 0) + REPORT.pack(ADAPTED, 1))
    command = Adapt(model=1, name="a", rank=4, layers={})
    assert one.leader.adapt([command]) == (1,)
    assert one.leader.adapt([command]) == ()
    one.theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(DeviceLostError, match="rank 1 does not say"):
        one.leader.adapt([command])


def test_regions_are_found_by_address() -> None:
    regions = Regions()
    memory = torch.zeros(32, dtype=torch.uint8)
    regions.add("a", memory[:16])
    regions.add("b", memory[16:])
    assert regions.find(memory[20:24]) == ("b", memory.data_ptr() + 16)
    regions.remove("b")
    with pytest.raises(AssertionError, match="in no region"):
        regions.find(memory[20:24])
    with pytest.raises(AssertionError, match="in no region"):
        regions.find(memory[12:20])
