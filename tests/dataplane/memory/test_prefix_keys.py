from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.prefix_keys import KEY_BYTES, PrefixChain, prefix_scope

SCOPE = prefix_scope("model", "/checkpoint", "")
tokens_lists = st.lists(st.integers(0, 2), max_size=12)


def keys(tokens: list[int], scope: bytes = SCOPE, block_tokens: int = 4) -> list[bytes]:
    chain = PrefixChain(scope, tokens, block_tokens)
    return chain.keys(chain.full_blocks)


@given(tokens_lists, tokens_lists)
def test_two_sequences_share_as_many_keys_as_full_blocks_of_their_common_prefix(one: list[int], two: list[int]) -> None:
    common = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    shared = len(set(keys(one)) & set(keys(two)))
    assert shared == common // 4


def test_equal_blocks_after_different_ones_have_different_keys() -> None:
    first, second = keys([1, 2, 3, 4] * 2)
    assert first != second
    assert len(first) == KEY_BYTES
    assert keys([9, 9, 9, 9, 1, 2, 3, 4])[1] not in (first, second)


def test_model_checkpoint_and_salt_are_part_of_every_key() -> None:
    scopes = {
        prefix_scope("model", "/checkpoint", ""),
        prefix_scope("model", "/checkpoint", "tenant"),
        prefix_scope("model", "/checkpointtenant", ""),
        prefix_scope("model/checkpoint", "", ""),
    }
    assert len(scopes) == 4, "parts are not run together"
    assert len({key for scope in scopes for key in keys([1, 2, 3, 4], scope)}) == 4


def test_keys_follow_a_growing_sequence() -> None:
    tokens = [5, 6, 7]
    chain = PrefixChain(SCOPE, tokens, 4)
    assert (chain.full_blocks, chain.reusable_blocks, chain.keys(0)) == (0, 0, [])
    tokens.append(8)
    assert (chain.full_blocks, chain.reusable_blocks) == (1, 0), "the last token is computed, for its logits"
    first = chain.keys(1)
    tokens += [1, 2, 3, 4, 5]
    assert (chain.full_blocks, chain.reusable_blocks) == (2, 2)
    assert chain.keys(2)[:1] == first
    assert chain.keys(2) == keys(tokens)
