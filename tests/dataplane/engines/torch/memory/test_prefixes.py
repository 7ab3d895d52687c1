"""Cached prefixes on their way to host memory and back, with transfers that end when the test says so."""

from collections.abc import Sequence

import torch

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.transfer_rates import TransferRate, TransferRates
from dataplane.memory.events import Event, FlagEvent
from dataplane.memory.kv_cache import KvShape
from dataplane.memory.slabs import SlabArena

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=4, block_tokens=4, itemsize=4)
SLAB_BYTES = 2 * SHAPE.block_bytes
LARGE = KvShape(layers=2, kv_heads=1, head_dim=4, block_tokens=4, itemsize=4)
SLABS = 4
TOKENS = list(range(21))
"""Five full blocks, and a token."""


class HeldStream:
    """A stream whose submissions end when they are told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Sequence[Copy], FlagEvent]] = []

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> FlagEvent:
        self.submitted.append((copies, FlagEvent()))
        return self.submitted[-1][1]

    def end(self, error: Exception | None = None) -> None:
        """End the oldest."""
        copies, event = self.submitted.pop(0)
        for copy in copies if error is None else ():
            copy.target.copy_(copy.source)
        event.finish(error)

    def close(self) -> None:
        """Nothing runs."""


class Slot:
    def __init__(self, *, host_slabs: int = SLABS) -> None:
        self.streams = {"kv_in": HeldStream(), "kv_out": HeldStream()}
        self.arena = SlabArena(SLABS, weights_slabs=0)
        self.buffer = torch.zeros(SLABS * SLAB_BYTES, dtype=torch.uint8)
        rate = TransferRate(1e9, known=True)
        self.store = KvStore(
            self.arena,
            self.buffer,
            SLAB_BYTES,
            host_bytes=host_slabs * SLAB_BYTES,
            host_file=None,
            make_stream=self.streams.__getitem__,
            rates=TransferRates(weights=rate, kv_in=rate, kv_out=rate),
        )
        self.sequences: list[SequenceKv] = []

    def sequence(self, tokens: Sequence[int] = TOKENS) -> SequenceKv:
        kv = SequenceKv(shape=SHAPE, model="model", layout="layout")
        self.store.track(kv, tokens, "")
        self.sequences.append(kv)
        return kv

    def compute(self, tokens: Sequence[int] = TOKENS) -> SequenceKv:
        """A sequence that computed all its tokens: each block is full of its number."""
        kv = self.sequence(tokens)
        assert self.store.grow(kv, len(tokens))
        for number, block in enumerate(kv.blocks):
            self.bytes_of(block)[:] = number + 1
        self.store.computed(kv, len(tokens))
        return kv

    def bytes_of(self, block: int) -> torch.Tensor:
        return self.buffer.view(-1, SHAPE.block_bytes)[block]

    def settle(self) -> None:
        self.store.settle()
        self.store.check(self.sequences)

    def fill(self) -> SequenceKv:
        """A sequence that needs the whole memory; it asks for the first time."""
        kv = self.sequence([90] * 32)
        assert not self.store.grow(kv, 32)
        assert self.store.evicting
        return kv

    def evicted(self) -> SequenceKv:
        """What was computed is in host memory, and another sequence has the whole device."""
        self.store.drop(self.compute())
        other = self.fill()
        self.streams["kv_out"].end()
        self.settle()
        assert self.store.grow(other, 32)
        return other


def test_blocks_that_are_copied_to_host_memory_are_free_after_that_and_found_there() -> None:
    slot = Slot()
    slot.store.drop(slot.compute())
    other = slot.fill()
    assert slot.store.freeing
    slot.settle()
    assert not slot.store.grow(other, 32), "the copy reads them"
    early = slot.sequence()
    assert slot.store.grow(early, 8)
    assert slot.store.reused_tokens(early) == 0, "what is being copied cannot be read"
    slot.store.drop(early)
    slot.streams["kv_out"].end()
    slot.settle()
    assert not slot.store.freeing
    assert slot.store.grow(other, 32)
    slot.store.drop(other)
    again = slot.sequence()
    assert slot.store.grow(again, 22)
    assert (again.location, slot.store.reused_tokens(again)) == (KvLocation.SWAPPING_IN, 20)
    slot.streams["kv_in"].end()
    slot.settle()
    assert again.location is KvLocation.DEVICE
    for number, block in enumerate(again.blocks[:5]):
        assert bool((slot.bytes_of(block) == number + 1).all())


def test_one_that_asks_again_while_blocks_are_copied_evicts_no_others() -> None:
    slot = Slot()
    slot.store.drop(slot.compute())
    other, larger = slot.sequence([90] * 16), slot.sequence([91] * 20)
    for _ in range(3):
        assert not slot.store.grow(other, 16)
    assert [len(copies) for copies, _ in slot.streams["kv_out"].submitted] == [1]
    assert not slot.store.grow(larger, 20)
    assert [len(copies) for copies, _ in slot.streams["kv_out"].submitted] == [1, 1], "only what is missing besides"
    slot.streams["kv_out"].end()
    slot.settle()
    assert slot.store.grow(other, 16)
    again = slot.sequence()
    assert not slot.store.grow(again, 22), "the other has the memory"
    slot.store.drop(other)
    assert slot.store.grow(again, 16)
    assert (again.location, slot.store.reused_tokens(again)) == (KvLocation.DEVICE, 12)


def test_a_slab_of_another_shape_that_is_being_copied_is_awaited() -> None:
    slot = Slot()
    for tokens in ([50] * 8, [60] * 8, [70] * 8, [80] * 8):
        slot.store.drop(slot.compute(tokens))
    large = SequenceKv(shape=LARGE, model="model", layout="layout")
    slot.sequences.append(large)
    for _ in range(3):
        assert not slot.store.grow(large, 4)
    assert [len(copies) for copies, _ in slot.streams["kv_out"].submitted] == [2], "one slab"
    slot.streams["kv_out"].end()
    slot.settle()
    assert slot.store.grow(large, 4)


def test_a_copy_that_fails_is_not_found() -> None:
    slot = Slot()
    slot.store.drop(slot.compute())
    other = slot.fill()
    slot.streams["kv_out"].end(RuntimeError("broken"))
    slot.settle()
    assert slot.store.grow(other, 32)
    slot.store.drop(other)
    again = slot.sequence()
    assert slot.store.grow(again, 22)
    assert (again.location, slot.store.reused_tokens(again)) == (KvLocation.DEVICE, 0)


def test_a_second_sequence_waits_for_the_blocks_that_arrive_for_the_first() -> None:
    slot = Slot()
    slot.store.drop(slot.evicted())
    first, second = slot.sequence(), slot.sequence()
    assert slot.store.grow(first, 22)
    assert slot.store.grow(second, 22)
    assert first.blocks[:5] == second.blocks[:5]
    assert len(slot.streams["kv_in"].submitted) == 1, "transferred once"
    slot.settle()
    assert {first.location, second.location} == {KvLocation.SWAPPING_IN}
    slot.store.drop(first)
    slot.settle()
    slot.streams["kv_in"].end()
    slot.settle()
    assert second.location is KvLocation.DEVICE
    assert bool((slot.bytes_of(second.blocks[4]) == 5).all())


def test_a_prefix_that_does_not_arrive_is_computed_again_and_not_transferred_again() -> None:
    slot = Slot()
    slot.store.drop(slot.evicted())
    first, second = slot.sequence(), slot.sequence()
    assert slot.store.grow(first, 22)
    assert slot.store.grow(second, 22)
    slot.streams["kv_in"].end(RuntimeError("broken"))
    slot.settle()
    assert {first.location, second.location} == {KvLocation.NONE}, "lost: the engine queues them"
    assert slot.store.grow(first, 22)
    assert (first.location, slot.store.reused_tokens(first)) == (KvLocation.DEVICE, 0)
    slot.store.drop(first)
    slot.settle()
    assert slot.arena.kv_slabs == 0, "nothing is kept of it"


def test_one_that_comes_before_the_failure_is_noticed_gets_the_copy() -> None:
    slot = Slot()
    slot.store.drop(slot.evicted())
    first, second = slot.sequence(), slot.sequence(TOKENS[:5])
    assert slot.store.grow(first, 22)
    slot.streams["kv_in"].end(RuntimeError("broken"))
    assert slot.store.grow(second, 6)
    assert second.location is KvLocation.SWAPPING_IN, "not the block whose contents did not arrive"
    slot.settle()
    assert (first.location, second.location) == (KvLocation.NONE, KvLocation.SWAPPING_IN)
    slot.streams["kv_in"].end()
    slot.settle()
    assert second.location is KvLocation.DEVICE
    assert bool((slot.bytes_of(second.blocks[0]) == 1).all())


def test_memory_that_a_transfer_still_writes_to_is_not_allocated() -> None:
    slot = Slot(host_slabs=3)
    slot.store.drop(slot.evicted())
    leaves = slot.sequence()
    assert slot.store.grow(leaves, 22)
    arriving = set(leaves.blocks)
    slot.store.drop(leaves)
    other = slot.sequence([91] * 32)
    assert not slot.store.grow(other, 32)
    assert slot.store.grow(other, 8)
    assert arriving.isdisjoint(other.blocks)
    slot.streams["kv_in"].end()
    slot.settle()
    assert slot.store.grow(other, 32)


def test_without_host_memory_blocks_are_dropped_at_once() -> None:
    slot = Slot(host_slabs=0)
    slot.store.drop(slot.compute())
    other = slot.sequence([90] * 32)
    assert slot.store.grow(other, 32)
    assert not slot.streams["kv_out"].submitted


def test_where_host_memory_holds_less_the_beginning_of_a_prefix_is_kept() -> None:
    slot = Slot(host_slabs=1)
    slot.store.drop(slot.evicted())
    again = slot.sequence()
    assert slot.store.grow(again, 22)
    assert slot.store.reused_tokens(again) == 8


def test_a_preempted_sequence_finds_room_in_host_memory_where_copies_are() -> None:
    slot = Slot(host_slabs=4)
    other = slot.evicted()
    assert slot.store.host_fits(other, 32)
    assert slot.store.swap_out(other, 32)
    slot.streams["kv_out"].end()
    slot.settle()
    assert other.location is KvLocation.HOST
    again = slot.sequence()
    assert slot.store.grow(again, 22)
    assert slot.store.reused_tokens(again) == 0, "the copies made way"


def test_a_model_that_is_forgotten_leaves_nothing() -> None:
    slot = Slot()
    slot.store.drop(slot.evicted())
    slot.store.drop(slot.compute(list(range(50, 71))))
    slot.store.forget("model")
    slot.settle()
    assert slot.arena.kv_slabs == 0
    again = slot.sequence()
    assert slot.store.grow(again, 22)
    assert slot.store.reused_tokens(again) == 0
