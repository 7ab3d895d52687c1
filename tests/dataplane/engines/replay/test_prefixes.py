"""The bookkeeping of a replayed prefix cache, against a model of what must hold."""

from hypothesis import given
from hypothesis import strategies as st

from dataplane.engines.replay.prefixes import CachedBlocks


def test_blocks_in_use_stay_and_idle_ones_go_to_host_memory_and_are_dropped() -> None:
    cache = CachedBlocks(host_blocks=2)
    cache.add("abcd")
    cache.evict(0)
    assert cache.find("abcd") == 4, "in use"
    cache.release("abcd")
    assert (cache.idle, cache.find("abcd")) == (4, 4)
    cache.evict(2)
    assert (cache.idle, cache.find("abcd")) == (2, 4), "the end is in host memory"
    assert cache.take("abcd") == (4, 2)
    cache.release("abcd")
    cache.evict(0)
    assert cache.find("abcd") == 2, "the end was dropped first"


def test_a_shared_block_stays_until_its_last_user_has_gone() -> None:
    cache = CachedBlocks(host_blocks=0)
    cache.add("ab")
    assert cache.take("abc") == (2, 0)
    cache.release("ab")
    cache.evict(0)
    assert cache.find("ab") == 2
    cache.release("ab")
    cache.evict(0)
    assert cache.find("ab") == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = CachedBlocks(host_blocks=0)
    for prefix in ("ab", "xy"):
        cache.add(prefix)
        cache.release(prefix)
    cache.take("ab")
    cache.release("ab")
    cache.evict(2)
    assert (cache.find("ab"), cache.find("xy")) == (2, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=40), st.integers(0, 5))
def test_a_hit_is_always_a_beginning_that_was_added(steps: list[tuple[int, int, int]], host: int) -> None:
    cache = CachedBlocks(host)
    known: set[tuple[int, ...]] = set()
    using: list[list[tuple[int, ...]]] = []
    for family, length, keep in steps:
        chain = [(family, *range(number)) for number in range(length)]
        held, loaded = cache.take(chain)
        assert loaded <= held
        assert all(block in known for block in chain[:held])
        cache.add(chain[held:])
        known.update(chain)
        using.append(chain)
        if keep % 2:
            cache.release(using.pop(0))
        cache.evict(keep)
        assert cache.idle <= keep
        assert all(cache.find(each) == len(each) for each in using), "nothing in use is evicted"
