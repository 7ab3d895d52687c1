"""Prompts that begin alike on a simulated instance: worked times, and what eviction and host memory change."""

from math import inf
from typing import Any

import pytest

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.simulator.kernel.answers import TrueAnswers
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.requests import BLOCK_TOKENS, Request, Served
from ops.simulator.servers.dedicated import Instance

# A prefill takes 1 ms a token, a decode step 10 ms, and a block comes from host memory in 5.12 ms.
LATENCY = LatencyModel(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-3,
    prefill_per_token2_s=0.0,
    decode_base_s=1e-2,
    decode_per_context_token_s=0.0,
    decode_per_sequence_s=0.0,
)
MODEL = ModelCosts(name="m", latency=LATENCY, weights_bytes=1, kv_bytes_per_token=1, bytes_per_s=1e5)
LONG = 4 * BLOCK_TOKENS + 10


def asked(number: int, at_s: float, *blocks: int, prompt: int = LONG, output: int = 2) -> Request:
    return Request(number, at_s, "m", "r", Tier.IW_N, prompt, output, blocks)


def served(*requests: Request, kv_tokens: int = 10**6, **settings: Any) -> list[Served]:
    ended: list[Served] = []
    own = InstanceSettings(kv_bytes=kv_tokens, prefill_tokens_per_step_max=10**6, **settings)
    instance = Instance(MODEL, own, TrueAnswers(), ended.append)
    for request in requests:
        instance.advance(request.arrived_s)
        instance.submit(Served(request, TIER_OBJECTIVES[Tier.IW_N]), request.arrived_s)
    while instance.next_s < inf:
        instance.advance(instance.next_s)
    assert (instance.remaining_tokens, instance.kv_tokens, instance.requests) == (0, 0, 0)
    return sorted(ended, key=lambda one: one.request.number)


def test_cached_blocks_take_no_prefill() -> None:
    first, same, other, half = served(
        asked(0, 0.0, 1, 2, 3, 4), asked(1, 10.0, 1, 2, 3, 4), asked(2, 20.0, 9, 2, 3, 4), asked(3, 30.0, 1, 2, 7, 8)
    )
    assert [one.cached for one in (first, same, other, half)] == [0, 2048, 0, 1024]
    assert first.ttft_s == pytest.approx(2.058)
    assert same.ttft_s == pytest.approx(0.010)
    assert other.ttft_s == pytest.approx(2.058)
    assert half.ttft_s == pytest.approx(1.034)


def test_at_least_one_token_is_computed() -> None:
    again = served(asked(0, 0.0, 1, 2, prompt=1024), asked(1, 9.0, 1, 2, prompt=1024))[1]
    assert again.cached == BLOCK_TOKENS


def test_a_prompt_that_waits_with_the_first_finds_it_computed() -> None:
    _, _, last = served(asked(0, 0.0, 1, 2, 3, 4), asked(1, 0.1, 5, 6, 7, 8), asked(2, 0.2, 1, 2, 3, 4))
    assert last.cached in (0, 2048)
    assert served(asked(0, 0.0, 1, 2, 3, 4), asked(1, 0.1, 1, 2, 3, 4))[1].cached == 2048


@pytest.mark.parametrize(("host_bytes", "cached", "ttft_s"), [(0, 0, 2.058), (10**6, 2048, 0.010 + 4 * 5.12e-3)])
def test_what_is_evicted_comes_back_from_host_memory_if_there_is_any(
    host_bytes: int, cached: int, ttft_s: float
) -> None:
    requests = [asked(0, 0.0, 1, 2, 3, 4), asked(1, 10.0, 5, 6, 7, 8), asked(2, 20.0, 1, 2, 3, 4)]
    last = served(*requests, kv_tokens=2200, prefix_host_bytes=host_bytes)[2]
    assert (last.cached, last.ttft_s) == (cached, pytest.approx(ttft_s))


def test_without_blocks_nothing_is_shared() -> None:
    assert [one.cached for one in served(asked(0, 0.0), asked(1, 10.0), asked(2, 20.0))] == [0, 0, 0]
