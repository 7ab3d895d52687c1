"""Guessed step times: worked by hand, near published measurements, and slower for more work on a lesser card."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduling.profile import load_gpu_profile
from ops.profiling.cards import CARDS, Card
from ops.profiling.guess import guess_times

PROFILES = Path(__file__).parents[3] / "ops" / "profiles"
KV_7B = 57_344
SLOW = Card(
    name="slow", memory_bytes=2**30, flops=1e12, memory_bytes_per_s=1e11, pcie_bytes_per_s=1e10, link_bytes_per_s=1e10
)


def test_a_guess_by_hand() -> None:
    """Two gigabytes: a billion parameters, 2 ms a token, 20 ms to read, a switch of 0.32 s."""
    times = guess_times(2 * 10**9, 1_000, SLOW)
    assert times.latency.prefill_per_token_s == pytest.approx(2e-3 / 0.65)
    assert times.latency.decode_base_s == pytest.approx(3.5e-3 + 1.2 * 20e-3)
    assert times.latency.decode_per_context_token_s == pytest.approx(1_000 / 1e11)
    assert times.latency.decode_per_sequence_s == pytest.approx(1e-4 + 2e-3)
    assert times.switch_s == pytest.approx(0.32)
    assert "guess" in times.source


def test_a_guess_for_two_gpus_by_hand() -> None:
    """Half of each but the sums: 17.2 layers of width 2,202, so 151,500 bytes a token over 5.5 gigabytes a second."""
    one, two = guess_times(2 * 10**9, 1_000, SLOW).latency, guess_times(2 * 10**9, 1_000, SLOW, gpus=2)
    sums_s = 4 * 17.2 * 2_202 / 5.5e9
    assert two.latency.prefill_per_token_s == pytest.approx(one.prefill_per_token_s / 2 + sums_s, rel=1e-3)
    assert two.latency.prefill_base_s == pytest.approx(one.prefill_base_s + 7e-3)
    assert two.latency.decode_base_s == pytest.approx(3.5e-3 + 10e-3 + 1.2 * 10e-3)
    assert two.switch_s == pytest.approx(0.16)
    assert "2 slow" in two.source


def test_quantized_weights_are_read_quicker_and_computed_with_as_long() -> None:
    dense, quantized = guess_times(2 * 10**9, 1_000, SLOW), guess_times(5 * 10**8, 1_000, SLOW, parameters=10**9)
    assert quantized.latency.prefill_per_token_s == dense.latency.prefill_per_token_s
    assert quantized.switch_s == pytest.approx(dense.switch_s / 4)
    assert quantized.latency.decode_base_s < dense.latency.decode_base_s


@pytest.mark.parametrize("name", ["7B", "13B", "14B"])
def test_a_guess_is_within_one_and_a_half_of_measured_profiles(name: str) -> None:
    profile = load_gpu_profile(PROFILES / "h800.toml")
    measured = next(model for model in profile.models if model.name == name)
    guessed = guess_times(measured.weights_bytes, KV_7B, CARDS["H800"]).latency
    for tokens in (500, 2_000):
        ratio = guessed.prefill_s(tokens, tokens**2) / measured.latency.prefill_s(tokens, tokens**2)
        assert 1 / 1.5 < ratio < 1.5
    for batch in (1, 16):
        ratio = guessed.decode_s(1_000 * batch, batch) / measured.latency.decode_s(1_000 * batch, batch)
        assert 1 / 1.5 < ratio < 1.5


@given(st.sampled_from(sorted(CARDS)), st.integers(1, 4))
def test_more_gpus_read_a_large_model_quicker(card: str, gpus: int) -> None:
    """Of 140 GB, the time that weights take to be read and brought shrinks by more than a group adds."""
    fewer, more = (guess_times(140 * 10**9, 327_680, CARDS[card], gpus=count) for count in (gpus, 2 * gpus))
    group_s = 10e-3 if gpus == 1 else 0.0
    assert more.latency.decode_s(1_000, 1) < fewer.latency.decode_s(1_000, 1) + group_s
    assert more.switch_s == pytest.approx(fewer.switch_s / 2)


@given(st.integers(10**8, 10**12), st.integers(0, 10**7), st.sampled_from(sorted(CARDS)))
def test_more_weights_never_take_less(weights_bytes: int, kv_bytes: int, card: str) -> None:
    less, more = (guess_times(size, kv_bytes, CARDS[card]) for size in (weights_bytes, 2 * weights_bytes))
    assert less.latency.prefill_s(512, 512**2) <= more.latency.prefill_s(512, 512**2)
    assert less.latency.decode_s(512, 4) <= more.latency.decode_s(512, 4)
    assert less.switch_s < more.switch_s
