"""The bookkeeping of a replayed prefix cache, against a model of what must hold."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dataplane.engines.interface import EngineRequest
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.prefixes import CachedBlocks
from dataplane.protocol.tiers import Tier
from tests.ops.simulator.replayed import KV_BYTES_PER_TOKEN, LATENCY, Clock, profile_of, spec_of


def test_blocks_in_use_stay_and_idle_ones_go_to_host_memory_and_are_dropped() -> None:
    cache = CachedBlocks()
    cache.add("abcd")
    cache.evict(0, 2)
    assert cache.find("abcd") == 4, "in use"
    cache.release("abcd")
    assert (cache.idle_size, cache.find("abcd")) == (4, 4)
    cache.evict(2, 2)
    assert (cache.idle_size, cache.find("abcd")) == (2, 4), "the end is in host memory"
    assert cache.take("abcd") == (4, 2)
    cache.release("abcd")
    cache.evict(0, 2)
    assert cache.find("abcd") == 2, "the end was dropped first"


def test_a_shared_block_stays_until_its_last_user_has_gone() -> None:
    cache = CachedBlocks()
    cache.add("ab")
    assert cache.take("abc") == (2, 0)
    cache.release("ab")
    cache.evict(0, 0)
    assert cache.find("ab") == 2
    cache.release("ab")
    cache.evict(0, 0)
    assert cache.find("ab") == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = CachedBlocks()
    for prefix in ("ab", "xy"):
        cache.add(prefix)
        cache.release(prefix)
    cache.take("ab")
    cache.release("ab")
    cache.evict(2, 0)
    assert (cache.find("ab"), cache.find("xy")) == (2, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=40), st.integers(0, 5))
def test_a_hit_is_always_a_beginning_that_was_added(steps: list[tuple[int, int, int]], host: int) -> None:
    cache = CachedBlocks()
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
        cache.evict(keep, host)
        assert cache.idle_size <= keep
        assert all(cache.find(each) == len(each) for each in using), "nothing in use is evicted"


def served(
    engine: ReplayEngine, clock: Clock, name: str, prompt: Sequence[int], *, salt: str = ""
) -> tuple[float, list[int], int]:
    """Seconds to the first token, all tokens, and how many tokens of the prompt were cached."""
    engine.add(
        EngineRequest(
            request_id=name,
            instance_id="i",
            tier=Tier.IW_N,
            prompt=tuple(prompt),
            max_tokens=4,
            temperature=0.0,
            cache_salt=salt,
        )
    )
    began_s, first_s, tokens, cached = clock(), -1.0, list[int](), 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            if output.token_ids and not tokens:
                first_s, cached = clock() - began_s, output.cached_tokens
            tokens += output.token_ids
    return first_s, tokens, cached


def engine_of(
    clock: Clock, *, kv_tokens: int = 10_000, host_tokens: int = 10_000, prefix_cache: bool = True
) -> ReplayEngine:
    settings = ReplaySettings(
        profile=profile_of(LATENCY),
        weights_bytes=10,
        kv_bytes=kv_tokens * KV_BYTES_PER_TOKEN,
        host_kv_bytes=host_tokens * KV_BYTES_PER_TOKEN,
        prefix_cache=prefix_cache,
    )
    engine = ReplayEngine(settings, clock, clock.sleep)
    engine.load("i", spec_of("m"))
    return engine


def test_an_engine_computes_prompts_that_begin_alike_once() -> None:
    clock = Clock()
    engine, plain = engine_of(clock), engine_of(clock, prefix_cache=False)
    prompt = list(range(1000))
    first_s, tokens, cached = served(engine, clock, "1", prompt)
    assert cached == 0
    again_s, same, cached = served(engine, clock, "2", prompt)
    assert (same, cached) == (tokens, 992)
    assert again_s < first_s / 2
    assert served(engine, clock, "3", prompt, salt="another")[2] == 0
    turn = [*prompt, *tokens, *range(100)]
    longer_s, answer, cached = served(engine, clock, "4", turn)
    assert cached in (992, 1000)
    assert answer == served(plain, clock, "4", turn)[1], "hits change no token"
    assert served(plain, clock, "5", turn)[2] == 0
    assert engine.kv.used_bytes == 0, "what is only cached counts as free"
    assert longer_s < first_s


def test_what_is_evicted_returns_from_host_memory_or_is_computed_again() -> None:
    for host_tokens, cached in ((10_000, 992), (0, 0)):
        clock = Clock()
        engine = engine_of(clock, kv_tokens=1500, host_tokens=host_tokens)
        served(engine, clock, "1", range(1000))
        served(engine, clock, "2", range(5000, 6490))
        assert served(engine, clock, "3", range(1000))[2] == cached
        assert engine.kv.used_bytes == engine.kv.host_used_bytes == 0
