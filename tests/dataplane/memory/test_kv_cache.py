import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dataplane.memory.kv_cache import BlockPool, OutOfBlocksError, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_all_or_none() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 3 free"):
        pool.allocate(2)
    assert pool.free_blocks == 1
    pool.free(held)
    assert (pool.free_blocks, pool.used_blocks) == (3, 0)


def test_freeing_twice_or_what_was_never_held_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    for wrong in ([held[0], held[0]], [held[0], 3], [99]):
        with pytest.raises(ValueError, match="not all held"):
            pool.free(wrong)
    pool.free(held)
    with pytest.raises(ValueError, match="not all held"):
        pool.free(held)
    assert pool.free_blocks == 4


class PoolMachine(RuleBasedStateMachine):
    """No block is ever in two hands."""

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[int] = []

    @rule(target=grants, count=st.integers(0, 3))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.free_blocks:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return []
        blocks = self.pool.allocate(count)
        assert not set(blocks) & set(self.held)
        self.held += blocks
        return blocks

    @rule(grant=consumes(grants))
    def free(self, grant: list[int]) -> None:
        self.pool.free(grant)
        self.held = [block for block in self.held if block not in grant]

    @invariant()
    def all_are_accounted_for(self) -> None:
        assert len(set(self.held)) == len(self.held) == self.pool.used_blocks
        assert self.pool.free_blocks + self.pool.used_blocks == 12


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30)
