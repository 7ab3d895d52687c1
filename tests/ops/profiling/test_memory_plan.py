"""What fits on a card, by hand."""

import pytest

from dataplane.agent.settings import AgentSettings, WorkerSettings
from ops.profiling.cards import Card
from ops.profiling.memory_plan import ModelSizes, plan_memory

GB = 10**9
CARD = Card(
    name="card",
    memory_bytes=100 * GB,
    flops=1e14,
    memory_bytes_per_s=1e12,
    pcie_bytes_per_s=5e10,
    link_bytes_per_s=2e11,
)
LARGE = ModelSizes(name="large", weights_bytes=30 * GB, kv_bytes_per_token=1_000_000, context_tokens=32_768)
SMALL = ModelSizes(name="small", weights_bytes=4 * GB, kv_bytes_per_token=100_000, context_tokens=2_000)
HUGE = ModelSizes(name="huge", weights_bytes=95 * GB, kv_bytes_per_token=1_000_000, context_tokens=32_768)


def test_alone_a_model_has_what_its_weights_leave() -> None:
    plan = plan_memory([LARGE, SMALL], CARD, memory_share=0.9, tokens=4_000)
    large, small = plan.alone
    assert (plan.usable_bytes, large.kv_bytes, large.kv_tokens, large.batch) == (90 * GB, 60 * GB, 60_000, 15)
    assert (small.kv_tokens, small.batch) == (860_000, 430), "sequences of its own context, which is shorter"
    assert large.full_step_s == pytest.approx(large.times.latency.decode_s(60_000, 15))
    assert large.tokens_per_s == pytest.approx(15 / large.times.latency.decode_s(60_000, 15))


def test_pooled_the_largest_has_its_weights_reserved_and_all_share_the_kv() -> None:
    pooled = plan_memory([LARGE, SMALL], CARD, memory_share=0.9, tokens=4_000).pooled
    assert pooled.kv_share == 0.66
    assert [fit.kv_tokens for fit in pooled.fits] == [59_400, 594_000]
    assert pooled.host_bytes == (30 + 4) * GB + 59_400_000_000


def test_the_share_is_one_that_an_agent_takes() -> None:
    plan = plan_memory([LARGE, SMALL], CARD, memory_share=0.9, tokens=4_000)
    worker = WorkerSettings(memory_bytes=plan.usable_bytes)
    agent = AgentSettings.model_construct(kv_share=plan.pooled.kv_share)
    assert agent.weights_bytes(worker) >= LARGE.weights_bytes
    assert agent.kv_bytes(worker) == pytest.approx(plan.pooled.fits[0].kv_bytes, rel=1e-6)


def test_a_model_that_does_not_fit_is_named_so() -> None:
    plan = plan_memory([HUGE], CARD, memory_share=0.9, tokens=4_000)
    [alone] = plan.alone
    assert not alone.fits
    assert alone.full_step_s is None
    assert alone.tokens_per_s is None
    assert plan.pooled.kv_share is None


def test_a_slot_of_four_has_the_memory_of_four_less_the_adapters_of_each() -> None:
    plan = plan_memory([HUGE], CARD, memory_share=0.9, tokens=4_000, adapters_bytes=GB, gpus=4)
    [alone] = plan.alone
    assert (plan.gpus, plan.usable_bytes) == (4, 4 * 89 * GB)
    assert alone.kv_bytes == plan.usable_bytes - HUGE.weights_bytes
    assert alone.fits
    assert plan.pooled.kv_share == 0.73
    assert alone.times.switch_s == pytest.approx(95e9 / (4 * 5e10 * 0.625))
