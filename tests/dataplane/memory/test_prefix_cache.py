import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.memory.events import FlagEvent
from dataplane.memory.kv_cache import HostSlabs, KvCache, KvShape, OutOfBlocksError
from dataplane.memory.prefix_cache import CachedBlock, PrefixCache

SLAB_BYTES = 1024


def shape(block_bytes: int) -> KvShape:
    return KvShape(layers=1, kv_heads=1, head_dim=block_bytes // 2, block_tokens=1, itemsize=1)


SMALL, LARGE = shape(256), shape(512)  # 4 and 2 in a slab


class Memory:
    def __init__(self, slabs: int) -> None:
        self.slabs = HostSlabs(slabs)
        self.blocks = KvCache(self.slabs, SLAB_BYTES)
        self.prefixes = PrefixCache(self.blocks)

    def compute(self, keys: bytes, of: KvShape = SMALL) -> list[int]:
        """A sequence computes blocks, one a key."""
        blocks = self.blocks.allocate(of, len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self.prefixes.add(bytes([key]), "model", of, block)
        return blocks

    def evict(self, of: KvShape, blocks: int) -> bytes:
        chosen = self.prefixes.coldest(of, blocks)
        for entry in chosen:
            self.prefixes.evict(entry)
        return b"".join(entry.key for entry in chosen)


def test_blocks_without_references_stay_until_they_are_evicted_the_end_of_a_prefix_first() -> None:
    memory = Memory(2)
    blocks = memory.compute(b"abc")
    assert memory.prefixes.allocatable_blocks(SMALL) == 0
    memory.prefixes.release(SMALL, blocks)
    assert memory.prefixes.allocatable_blocks(SMALL) == 3
    first = memory.prefixes.find(b"a")
    assert first is not None
    assert first.block == blocks[0]
    memory.prefixes.take(first)
    assert memory.evict(SMALL, 9) == b"cb", "a block in use is not evicted"
    assert memory.prefixes.find(b"c") is None
    assert memory.prefixes.find(b"a") is first
    memory.prefixes.release(SMALL, blocks[:1])
    assert memory.evict(SMALL, 1) == b"a"
    assert memory.slabs.free_slabs == 2


def test_two_users_of_a_block_give_it_up_one_after_the_other() -> None:
    memory = Memory(1)
    blocks = memory.compute(b"a")
    entry = memory.prefixes.find(b"a")
    assert entry is not None
    memory.prefixes.take(entry)
    memory.prefixes.release(SMALL, blocks)
    assert memory.prefixes.coldest(SMALL, 1) == []
    memory.prefixes.release(SMALL, blocks)
    assert memory.prefixes.coldest(SMALL, 1) == [entry]


def test_the_second_block_of_a_key_stays_its_sequences_own() -> None:
    memory = Memory(1)
    one, two = memory.compute(b"a"), memory.compute(b"a")
    memory.prefixes.release(SMALL, two)
    entry = memory.prefixes.find(b"a")
    assert entry is not None
    assert entry.block == one[0]
    assert memory.blocks.free_blocks(SMALL) == 3


def test_recently_used_blocks_are_evicted_last() -> None:
    memory = Memory(2)
    one, two = memory.compute(b"ab"), memory.compute(b"cd")
    memory.prefixes.release(SMALL, one)
    memory.prefixes.release(SMALL, two)
    for key in (b"a", b"b"):
        entry = memory.prefixes.find(key)
        assert entry is not None
        memory.prefixes.take(entry)
    memory.prefixes.release(SMALL, one)
    assert memory.evict(SMALL, 3) == b"dcb"


def test_another_shape_gets_whole_slabs_and_none_in_which_something_is_held() -> None:
    memory = Memory(2)
    one, two = memory.compute(b"abcd"), memory.compute(b"efgh")
    memory.prefixes.release(SMALL, one[1:])
    memory.prefixes.release(SMALL, two)
    assert memory.prefixes.allocatable_blocks(LARGE) == 2
    assert sorted(memory.evict(LARGE, 4)) == sorted(b"efgh")
    assert len(memory.blocks.allocate(LARGE, 2)) == 2
    assert len(memory.prefixes) == 4


def test_the_colder_of_ones_own_blocks_and_anothers_slab_is_evicted() -> None:
    memory = Memory(2)
    large, small = memory.compute(b"xy", LARGE), memory.compute(b"abcd")
    memory.prefixes.release(LARGE, large)
    memory.prefixes.release(SMALL, small)
    assert sorted(memory.evict(SMALL, 4)) == sorted(b"xy"), "one slab of the other's is worth four blocks"
    assert memory.evict(SMALL, 1) == b"d"


def test_blocks_in_a_slab_are_found() -> None:
    memory = Memory(2)
    blocks = memory.compute(b"abcdef")
    memory.prefixes.release(SMALL, blocks)
    for slab in (0, 1):
        assert {e.block for e in memory.prefixes.within([slab])} == {b for b in blocks if b // 4 == slab}


def test_an_evicted_block_in_use_is_freed_with_its_last_reference() -> None:
    memory = Memory(1)
    blocks = memory.compute(b"a")
    memory.prefixes.forget("model")
    assert memory.prefixes.find(b"a") is None
    assert memory.slabs.free_slabs == 0
    memory.prefixes.release(SMALL, blocks)
    assert memory.slabs.free_slabs == 1


def test_memory_that_a_transfer_uses_is_free_after_it() -> None:
    memory = Memory(1)
    read, saved = FlagEvent(), FlagEvent()
    blocks = memory.compute(b"a")
    memory.prefixes.release(SMALL, blocks, after=read)
    entry = memory.prefixes.find(b"a")
    assert entry is not None
    entry.in_use_until(saved)
    memory.prefixes.evict(entry)
    for event in (read, saved):
        memory.blocks.settle()
        assert memory.slabs.free_slabs == 0
        event.finish()
    memory.blocks.settle()
    assert memory.slabs.free_slabs == 1


class Prefixes(RuleBasedStateMachine):
    """Sequences of blocks of two shapes that compute, share, drop and evict."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(4)
        self.sequences: list[tuple[KvShape, list[int]]] = []
        self.held: list[CachedBlock] = []
        self.transfers: list[FlagEvent] = []
        self.keys = itertools.count()

    @rule(of=st.sampled_from([SMALL, LARGE]), count=st.integers(1, 5))
    def compute(self, of: KvShape, count: int) -> None:
        prefixes, free = self.memory.prefixes, self.memory.blocks.free_blocks(of)
        room = free + self.memory.slabs.free_slabs * self.memory.blocks.blocks_per_slab(of)
        promised = room + prefixes.allocatable_blocks(of)
        try:
            blocks = self.memory.blocks.allocate(of, count)
        except OutOfBlocksError as error:
            busy = any(not entry.free_after.done() for entry in prefixes.coldest(of, error.missing_blocks))
            self.memory.evict(of, error.missing_blocks)
            try:
                blocks = self.memory.blocks.allocate(of, count)
            except OutOfBlocksError:
                assert promised < count or busy, "idle blocks count as free, and are not"
                return
        for block in blocks[:-1]:
            prefixes.add(next(self.keys).to_bytes(4, "big"), "model", of, block)
        self.sequences.append((of, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), reading=st.booleans())
    def drop(self, data: st.DataObject, reading: bool) -> None:
        of, blocks = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        event = FlagEvent()
        if reading:
            self.transfers.append(event)
        else:
            event.finish()
        self.memory.prefixes.release(of, blocks, after=event)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = [key for key in range(100) if self.memory.prefixes.find(key.to_bytes(4, "big"))]
        if known:
            entry = self.memory.prefixes.find(data.draw(st.sampled_from(known)).to_bytes(4, "big"))
            assert entry is not None
            self.memory.prefixes.take(entry)
            self.sequences.append((entry.shape, [entry.block]))

    @rule(owner=st.sampled_from(["model", "other"]))
    def forget(self, owner: str) -> None:
        self.memory.prefixes.forget(owner)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1))).finish()
        self.memory.blocks.settle()

    @invariant()
    def consistent(self) -> None:
        self.memory.slabs.check()
        self.memory.blocks.check()
        self.memory.prefixes.check([(of, block) for of, blocks in self.sequences for block in blocks])

    def teardown(self) -> None:
        for of, blocks in self.sequences:
            self.memory.prefixes.release(of, blocks)
        for transfer in self.transfers:
            transfer.finish()
        self.memory.evict(SMALL, 99)
        self.memory.evict(LARGE, 99)
        self.memory.blocks.settle()
        assert self.memory.slabs.free_slabs == self.memory.slabs.slabs


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
