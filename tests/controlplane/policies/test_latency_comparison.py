"""Predicted latency by hand-worked numbers and against the simulator, and what is made of the difference."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean

import numpy as np
import pytest

from controlplane.policies.latency_comparison import (
    ComparisonSettings,
    MeasuredLatency,
    ReportedLoad,
    TierLatency,
    compare_latency,
    predict_latency,
)
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.schedule import TurnSettings
from ops.simulator.kernel.costs import InstanceSettings
from ops.simulator.kernel.requests import Request, Served
from tests.ops.simulator.servers.test_dedicated import request, serve

LATENCY = LatencyModel(
    prefill_base_s=5.7e-3,
    prefill_per_token_s=2.3e-5,
    prefill_per_token2_s=2.1e-10,
    decode_base_s=8.5e-3,
    decode_per_context_token_s=4.4e-8,
    decode_per_sequence_s=1.1e-4,
)
NOTHING = dict.fromkeys(asdict(LATENCY), 0.0)
WORKED = NOTHING | {"prefill_base_s": 0.1, "decode_base_s": 0.02}
SETTINGS = ComparisonSettings()


def measured(**changes: float) -> MeasuredLatency:
    """Prompts of 100 tokens, each decoded for half a second: 25 ms for each of 20 tokens."""
    means = {"ttft_s": 0.12, "tbt_s": 0.025, "decode_s": 0.5, "prompt_tokens": 100.0, "context_tokens": 110.0}
    moments = {"x": 100.0, "y": 1e4, "xx": 1e4, "yy": 1e8, "xy": 1e6}
    return replace(MeasuredLatency(requests=500, **means, **moments), **changes)


def load(*rates: float, explained: float = 1.0) -> ReportedLoad:
    """In windows of these rates, of which `measured()` are a share."""
    return ReportedLoad(rates=rates, input_tokens=500 * 100.0 / explained)


def test_the_worked_example() -> None:
    """Two requests a second: rho 0.2, one other request decodes."""
    found = predict_latency(measured(), [200.0], WORKED)
    assert (found.prefill_share, found.prefill_share_max, found.batch) == (pytest.approx(0.2), pytest.approx(0.2), 2.0)
    assert found.tbt_s == pytest.approx(0.025)
    assert found.ttft_s == pytest.approx(2 * 0.1**2 / (2 * 0.8) + 0.1 + (1 - np.exp(-1)) * 0.01)


def test_every_coefficient_counts_once() -> None:
    """At hardly any load: alone in the batch, and no wait."""
    alone = measured(decode_s=0.0)
    for name, seconds in {
        "decode_base_s": 1.0,
        "decode_per_context_token_s": 110.0,
        "decode_per_sequence_s": 1.0,
    }.items():
        assert predict_latency(alone, [1e-9], NOTHING | {name: 1.0}).tbt_s == pytest.approx(seconds)
    for name, seconds in {"prefill_base_s": 1.0, "prefill_per_token_s": 100.0, "prefill_per_token2_s": 1e4}.items():
        found = predict_latency(alone, [1e-9], NOTHING | {name: 1.0})
        assert found.ttft_s == pytest.approx(seconds, rel=1e-6)


def test_the_wait_is_by_the_second_moment_of_prefills() -> None:
    """Half of the prompts have 50 tokens and half 150; c0 = 10 ms, a = 1 ms and b = 10 us, lambda = 1/s."""
    tokens = np.array([50.0, 150.0])
    moments = {
        "x": tokens.mean(),
        "y": (tokens**2).mean(),
        "xx": (tokens**2).mean(),
        "yy": (tokens**4).mean(),
        "xy": (tokens**3).mean(),
    }
    latency = NOTHING | {"prefill_base_s": 0.01, "prefill_per_token_s": 1e-3, "prefill_per_token2_s": 1e-5}
    seconds = 0.01 + 1e-3 * tokens + 1e-5 * tokens**2
    assert list(seconds) == [pytest.approx(0.085), pytest.approx(0.385)]
    wait_s = fmean(seconds**2) / (2 * (1 - fmean(seconds)))
    found = predict_latency(measured(decode_s=0.0, **moments), [100.0], latency)
    assert found.ttft_s == pytest.approx(wait_s + 0.235)


def test_windows_count_by_their_rates() -> None:
    """Three of four requests come in the busy window, which decodes 4 at a time; an idle one has none."""
    latency = NOTHING | {"decode_per_sequence_s": 0.01}
    found = predict_latency(measured(decode_s=1.0), [300.0, 100.0, 0.0], latency)
    assert found.batch == pytest.approx(0.75 * 4 + 0.25 * 2)
    assert found.tbt_s == pytest.approx(0.01 * found.batch)


def test_the_verdict_and_its_words() -> None:
    right = compare_latency(measured(), load(200.0), WORKED, SETTINGS)
    assert not right.differs
    assert right.reason == (
        "as the profile says: first tokens after 120.0 ms and by the profile after 118.8 ms (1.01 x), tokens after"
        " 25.0 ms and by the profile after 25.0 ms (1.00 x); 500 requests in batches of 2.0, prefills take 20% of the"
        " time and at most 20% of a window"
    )
    slow = compare_latency(measured(tbt_s=0.0376), load(200.0), WORKED, SETTINGS)
    assert (slow.differs, slow.reason.split(":")[0]) == (True, "decode is slower than the profile says")
    fast = compare_latency(measured(tbt_s=0.0166), load(200.0), WORKED, SETTINGS)
    assert (fast.differs, fast.reason.split(":")[0]) == (True, "decode is faster than the profile says")


@pytest.mark.parametrize(
    ("changes", "rate", "latency", "reason"),
    [
        ({"requests": 99}, 200.0, WORKED, "too few requests to tell"),
        ({}, 500.0, WORKED, "too loaded to tell"),
        ({"tbt_s": None}, 200.0, WORKED, "as the profile says"),
        ({}, 200.0, None, "the profile states no step times"),
    ],
)
def test_where_a_difference_tells_nothing_none_is_reported(
    changes: dict[str, float], rate: float, latency: Mapping[str, float] | None, reason: str
) -> None:
    means = replace(measured(tbt_s=9.0), **changes)
    reported = ReportedLoad(rates=[rate], input_tokens=means.requests * means.prompt_tokens)
    found = compare_latency(means, reported, latency, SETTINGS)
    assert (found.differs, found.reason.split(":")[0]) == (False, reason)
    assert (found.predicted is None) == (latency is None)


def test_where_no_load_was_reported_nothing_is_predicted() -> None:
    found = compare_latency(measured(tbt_s=9.0), ReportedLoad(), WORKED, SETTINGS)
    assert (found.predicted, found.differs, found.reason) == (None, False, "instances reported no load")


@pytest.mark.parametrize(
    ("explained", "logged_share", "told"), [(0.7, 1.0, True), (0.6, 1.0, False), (0.07, 0.1, True), (0.06, 0.1, False)]
)
def test_where_other_requests_fill_the_instance_nothing_is_predicted(
    explained: float, logged_share: float, *, told: bool
) -> None:
    """Deferred ones, or prompts of another length: lambda and the batch would not be theirs. Of a sample the share."""
    settings = replace(SETTINGS, logged_share=logged_share)
    found = compare_latency(measured(tbt_s=9.0), load(200.0, explained=explained), WORKED, settings)
    assert (found.predicted is not None, found.differs) == (told, told)
    words = "other requests than the logged ones fill it: these explain 60% of its input tokens"
    assert (found.reason == words) != told


def test_one_window_of_many_prefills_is_too_loaded() -> None:
    """TBT grows with 1 / (1 - rho), so one of 50 % decides where the mean is below the limit."""
    found = compare_latency(measured(tbt_s=9.0), load(500.0, *[100.0] * 11), WORKED, SETTINGS)
    assert found.predicted is not None
    assert found.predicted.prefill_share < SETTINGS.prefill_share_max < found.predicted.prefill_share_max
    assert (found.differs, found.reason.split(":")[0]) == (False, "too loaded to tell")


def test_a_profile_by_which_an_instance_could_not_keep_up_is_said_to_be_one() -> None:
    found = compare_latency(measured(), load(1000.0), WORKED, SETTINGS)
    assert found.predicted is not None
    assert (found.predicted.tbt_s, found.predicted.ttft_s) == (float("inf"), float("inf"))
    assert "tokens after 25.0 ms where the profile says that an instance cannot keep up" in found.reason


def simulated(rate_per_s: float, *, mixed: bool) -> tuple[MeasuredLatency, float]:
    """Requests of an instance in simulated time, with lognormal lengths, and its input tokens/s."""
    rng, count = np.random.default_rng(1), 1500
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts = np.clip(rng.lognormal(np.log(1000) - 0.5, 1.0, count), 1, 16_000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(200) - 0.3, 0.8, count), 1, 4000).astype(int)
    rows = zip(times_s, prompts, outputs, strict=True)
    requests: list[Request] = [request(n, float(t), int(p), int(o)) for n, (t, p, o) in enumerate(rows)]
    own = InstanceSettings(kv_bytes=10**15, batch_max=1000, turns=TurnSettings(mixed_batches=mixed))
    ended, _, _ = serve(requests, own, LATENCY)
    return _means(ended), float(prompts.sum() / times_s[-1])


def _means(ended: list[Served]) -> MeasuredLatency:
    prompts = np.array([float(each.request.prompt_tokens) for each in ended])
    later = np.array([each.request.output_tokens - 1.0 for each in ended])
    decode_s = np.array([each.last_s - each.first_s for each in ended])
    return MeasuredLatency(
        requests=len(ended),
        ttft_s=fmean(each.first_s - each.request.arrived_s for each in ended),
        tbt_s=float(decode_s.sum() / later.sum()),
        decode_s=float(decode_s.mean()),
        prompt_tokens=float(prompts.mean()),
        context_tokens=float((later * (prompts + later / 2)).sum() / later.sum()),
        x=float(prompts.mean()),
        y=float((prompts**2).mean()),
        xx=float((prompts**2).mean()),
        yy=float((prompts**4).mean()),
        xy=float((prompts**3).mean()),
        tiers={"IW-F": TierLatency(requests=len(ended), ttft_p50_s=0.0, ttft_p95_s=0.0)},
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("rate_per_s", [1.0, 5.0, 10.0])
def test_a_right_profile_predicts_simulated_latency_and_wrong_ones_are_found(rate_per_s: float, *, mixed: bool) -> None:
    """Up to batches of 50. Prompts that are prefilled beside the batch take the time that their objective leaves, so
    that a later first token does not say that prefills are slow.
    """
    means, rate = simulated(rate_per_s, mixed=mixed)
    right = asdict(LATENCY)
    predicted = predict_latency(means, [rate], right)
    assert means.tbt_s == pytest.approx(predicted.tbt_s, rel=0.1)
    assert means.ttft_s >= predicted.ttft_s
    if not mixed:
        assert means.ttft_s == pytest.approx(predicted.ttft_s, rel=0.2)
    reported = ReportedLoad(rates=[rate], input_tokens=means.requests * means.prompt_tokens)
    assert not compare_latency(means, reported, right, SETTINGS).differs
    for factor, word in ((0.5, "slower"), (2.0, "faster")):
        wrong = {name: factor * value if name.startswith("decode") else value for name, value in right.items()}
        found = compare_latency(means, reported, wrong, SETTINGS)
        assert (found.differs, word in found.reason) == (True, True)
