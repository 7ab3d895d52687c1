import itertools
import pickle
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.memory.events import FlagEvent
from dataplane.memory.kv_cache import HostSlabs, KvCache, KvShape, OutOfBlocksError, ShapeUsage, blocks_for
from dataplane.memory.slabs import SlabArena

SLAB_BYTES = 1024


def shape(block_bytes: int) -> KvShape:
    return KvShape(layers=1, kv_heads=1, head_dim=block_bytes // 2, block_tokens=1, itemsize=1)


SMALL, ODD, LARGE, WHOLE = shape(128), shape(300), shape(512), shape(1024)  # 8, 3, 2 and 1 in a slab


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_a_block_is_as_large_as_the_paper_says() -> None:
    qwen_7b = KvShape(layers=32, kv_heads=32, head_dim=128, block_tokens=16, itemsize=2)
    assert qwen_7b.block_bytes == 16 * 512 * 1024  # table 1


def test_a_block_that_exceeds_a_slab_is_refused_by_name() -> None:
    cache = KvCache(HostSlabs(4), SLAB_BYTES)
    assert [cache.blocks_per_slab(one) for one in (SMALL, ODD, LARGE, WHOLE)] == [8, 3, 2, 1]
    for refused in (cache.blocks_per_slab, lambda one: cache.allocate(one, 1)):
        with pytest.raises(ValueError, match="1026 bytes exceeds slab_bytes 1024"):
            refused(shape(1026))


def test_all_or_none_and_slabs_on_demand() -> None:
    slabs = HostSlabs(3)
    cache = KvCache(slabs, SLAB_BYTES)
    assert cache.free_blocks(ODD) == 0
    first = cache.allocate(ODD, 4)
    assert sorted(first) == [3, 6, 7, 8], "slab 2 and the first of slab 1"
    assert (slabs.free_slabs, cache.free_blocks(ODD)) == (1, 2)
    with pytest.raises(OutOfBlocksError, match="6 blocks wanted, 1 too many") as caught:
        cache.allocate(ODD, 6)
    assert caught.value.missing_blocks == 1
    assert (slabs.free_slabs, cache.free_blocks(ODD)) == (1, 2), "the slab that would not suffice is freed"
    assert len(set(first + cache.allocate(ODD, 5))) == 9
    assert cache.allocate(SMALL, 0) == []
    cache.check()
    slabs.check()


def test_an_empty_slab_serves_another_shape() -> None:
    slabs = HostSlabs(1)
    cache = KvCache(slabs, SLAB_BYTES)
    small = cache.allocate(SMALL, 2)
    with pytest.raises(OutOfBlocksError):
        cache.allocate(LARGE, 1)
    cache.free(SMALL, small[:1])
    assert slabs.free_slabs == 0
    cache.free(SMALL, small[1:])
    assert slabs.free_slabs == 1
    assert sorted(cache.allocate(LARGE, 2)) == [0, 1]


def test_new_blocks_come_from_the_fullest_slab() -> None:
    slabs = HostSlabs(3)
    cache = KvCache(slabs, SLAB_BYTES)
    blocks = sorted(cache.allocate(SMALL, 24))
    by_slab = [blocks[:8], blocks[8:16], blocks[16:]]
    cache.free(SMALL, by_slab[0][:5])  # 3 left
    cache.free(SMALL, by_slab[1][:2])  # 6 left
    cache.free(SMALL, by_slab[2][:6])  # 2 left
    assert [block // 8 for block in cache.allocate(SMALL, 4)] == [1, 1, 0, 0]
    cache.free(SMALL, by_slab[2][6:])
    assert slabs.free_slabs == 1, "the emptiest slab became free"
    cache.check()


def test_blocks_of_a_transfer_are_not_free_until_settled() -> None:
    slabs = HostSlabs(1)
    cache = KvCache(slabs, SLAB_BYTES)
    slow, failing = FlagEvent(), FlagEvent()
    one, two = cache.allocate(LARGE, 2)
    cache.free(LARGE, [one], slow)
    cache.free(LARGE, [two], failing)
    with pytest.raises(ValueError, match="not all held"):
        cache.free(LARGE, [one])
    failing.finish(OSError("failed, so it is over"))
    for settled in (False, True):
        if settled:
            cache.settle()
        assert cache.free_blocks(LARGE) == settled
    assert cache.usage() == {LARGE: ShapeUsage(used_bytes=512, held_bytes=1024, moving_bytes=512)}
    assert cache.allocate(LARGE, 1) == [two]
    slow.finish()
    cache.settle()
    cache.free(LARGE, [two])
    assert slabs.free_slabs == 1
    cache.check()


def test_freeing_twice_or_what_was_never_held_raises_and_changes_nothing() -> None:
    cache = KvCache(HostSlabs(1), SLAB_BYTES)
    held = cache.allocate(SMALL, 3)
    for wrong in ([held[0], held[0]], [held[0], 7], [99]):
        with pytest.raises(ValueError, match="not all held"):
            cache.free(SMALL, wrong)
    with pytest.raises(ValueError, match="not all held"):
        cache.free(LARGE, held)
    assert cache.free_blocks(SMALL) == 5
    cache.free(SMALL, held)
    with pytest.raises(ValueError, match="not all held"):
        cache.free(SMALL, held)


def test_usage_by_shape() -> None:
    cache = KvCache(HostSlabs(4), SLAB_BYTES)
    cache.allocate(ODD, 3)
    large = cache.allocate(LARGE, 3)
    usage = cache.usage()
    assert usage[ODD].fragmentation == pytest.approx(124 / 1024), "what no block fits in is unused too"
    assert usage[LARGE].fragmentation == 0.25
    cache.free(LARGE, large)
    assert cache.usage()[LARGE] == ShapeUsage(used_bytes=0, held_bytes=0, moving_bytes=0)
    assert cache.usage()[LARGE].fragmentation == 0.0


def test_only_an_allocated_host_slab_is_freed() -> None:
    slabs = HostSlabs(2)
    taken = slabs.take_kv()
    assert taken is not None
    with pytest.raises(KeyError):
        slabs.free_kv(1 - taken)
    slabs.check()


def test_a_cache_does_not_grow_with_the_blocks_that_it_had() -> None:
    cache, chance, held = KvCache(HostSlabs(8), SLAB_BYTES), random.Random(0), list[int]()
    for _ in range(5000):
        if chance.random() < 0.5 and len(held) < 60:
            held += cache.allocate(SMALL, chance.randint(0, min(4, 64 - len(held))))
        elif held:
            cache.free(SMALL, [held.pop(chance.randrange(len(held)))])
    assert len(pickle.dumps(cache)) < 2000


class CacheMachine(RuleBasedStateMachine):
    """Three shapes in an arena that weights share; transfers end in any order, or fail. No block is allocated twice."""

    SLABS, WEIGHTS_SLABS = 8, 2
    SHAPES = (SMALL, ODD, LARGE)

    def __init__(self) -> None:
        super().__init__()
        self.arena = SlabArena(self.SLABS, weights_slabs=self.WEIGHTS_SLABS)
        self.cache = KvCache(self.arena, SLAB_BYTES)
        self.grants: list[tuple[KvShape, list[int]]] = []
        self.in_transfer: list[tuple[FlagEvent, KvShape, list[int]]] = []
        self.weights = 0

    def bytes_of(self, one: KvShape, block: int) -> tuple[int, range]:
        """The slab of a block, and its bytes in there."""
        slab, index = divmod(block, self.cache.blocks_per_slab(one))
        return slab, range(index * one.block_bytes, (index + 1) * one.block_bytes)

    def in_use(self) -> list[tuple[KvShape, list[int]]]:
        return [*self.grants, *((one, blocks) for _, one, blocks in self.in_transfer)]

    @rule(one=st.sampled_from(SHAPES), count=st.integers(0, 9))
    def allocate(self, one: KvShape, count: int) -> None:
        free_kv = self.SLABS - max(self.WEIGHTS_SLABS, self.weights) - self.arena.kv_slabs
        available = self.cache.free_blocks(one) + free_kv * self.cache.blocks_per_slab(one)
        before = (self.arena.kv_slabs, self.cache.usage().get(one))
        if count > available:
            with pytest.raises(OutOfBlocksError) as caught:
                self.cache.allocate(one, count)
            assert caught.value.missing_blocks == count - available
            assert before[0] == self.arena.kv_slabs
            return
        blocks = self.cache.allocate(one, count)
        assert len(set(blocks)) == count
        if blocks:
            self.grants.append((one, blocks))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), in_flight=st.booleans())
    def free(self, data: st.DataObject, in_flight: bool) -> None:
        one, blocks = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        keep = data.draw(st.integers(0, len(blocks) - 1))
        data.draw(st.randoms(use_true_random=False)).shuffle(blocks)
        freed, kept = blocks[keep:], blocks[:keep]
        if kept:
            self.grants.append((one, kept))
        event = FlagEvent()
        if in_flight:
            self.in_transfer.append((event, one, freed))
        else:
            event.finish()
        self.cache.free(one, freed, event)

    @precondition(lambda self: self.in_transfer)
    @rule(data=st.data(), fails=st.booleans())
    def a_transfer_ends(self, data: st.DataObject, fails: bool) -> None:
        event, _, _ = self.in_transfer.pop(data.draw(st.integers(0, len(self.in_transfer) - 1)))
        event.finish(OSError() if fails else None)
        self.cache.settle()

    @rule(count=st.integers(1, 5))
    def weights_are_loaded_or_evicted(self, count: int) -> None:
        if self.weights:
            self.arena.free_run("model")
            self.weights = 0
        elif not self.arena.blocked & set(range(count)):
            self.arena.take_run("model", 0, count)
            self.weights = count

    @invariant()
    def no_byte_is_allocated_twice_and_none_is_lost(self) -> None:
        self.arena.check()
        self.cache.check()
        taken: dict[int, list[range]] = {}
        for one, blocks in self.in_use():
            for block in blocks:
                slab, extent = self.bytes_of(one, block)
                assert extent.stop <= SLAB_BYTES
                taken.setdefault(slab, []).append(extent)
        for slab, extents in taken.items():
            assert max(self.WEIGHTS_SLABS, self.weights) <= slab < self.SLABS
            extents.sort(key=lambda extent: extent.start)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(extents))
        assert self.arena.kv_slabs == len(taken), "a slab is held if and only if a block of it is in use"

    @invariant()
    def usage_adds_up(self) -> None:
        usage = self.cache.usage()
        used, moving = dict.fromkeys(usage, 0), dict.fromkeys(usage, 0)
        for one, blocks in self.in_use():
            used[one] += len(blocks) * one.block_bytes
        for _, one, blocks in self.in_transfer:
            moving[one] += len(blocks) * one.block_bytes
        assert {one: usage[one].used_bytes for one in usage} == used
        assert {one: usage[one].moving_bytes for one in usage} == moving
        assert sum(one.held_bytes for one in usage.values()) == self.arena.kv_slabs * SLAB_BYTES

    def teardown(self) -> None:
        for event, _, _ in self.in_transfer:
            event.finish()
        self.cache.settle()
        for one, blocks in self.grants:
            self.cache.free(one, blocks)
        self.cache.check()
        assert self.arena.kv_slabs == 0, "leaked"


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=40)
