"""A dedicated instance against the live engine step by step, and against theory."""

from collections.abc import Sequence
from math import inf
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.tiers import Objective
from dataplane.scheduling.attainment import ServedRequest, service_share, tokens_in_time
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.schedule import TurnSettings
from ops.simulator.kernel.answers import TrueAnswers
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.batch import Batch
from ops.simulator.servers.batch import Sequence as BatchSequence
from ops.simulator.servers.dedicated import Instance
from tests.ops.simulator.replayed import KV_BYTES_PER_TOKEN, LATENCY, profile_of, replay, spec_of

TARGET = Objective(ttft_s=1.0, tbt_s=0.02)


def serve(
    requests: Sequence[Request], instance_settings: InstanceSettings, latency: LatencyModel = LATENCY
) -> tuple[list[Served], Instance, float]:
    """Those served in order of their numbers, the instance, and the time-integral of those in the system."""
    ended: list[Served] = []
    inside = 0
    integral = last_s = 0.0

    def count(change: int, now_s: float) -> None:
        nonlocal inside, integral, last_s
        integral += inside * (now_s - last_s)
        inside, last_s = inside + change, now_s

    def out(served: Served) -> None:
        count(-1, served.last_s)
        ended.append(served)

    model = ModelCosts(
        name="m", latency=latency, weights_bytes=1, kv_bytes_per_token=KV_BYTES_PER_TOKEN, bytes_per_s=1e12
    )
    instance = Instance(model, instance_settings, TrueAnswers(), out)

    def advance(until_s: float) -> None:
        while instance.next_s < until_s:
            instance.advance(instance.next_s)
            assert instance.kv_tokens <= instance.kv_tokens_max

    for request in requests:
        advance(request.arrived_s)
        instance.submit(Served(request=request, target=TARGET), request.arrived_s)
        count(1, request.arrived_s)
    advance(inf)
    assert instance.inside == []
    assert instance.remaining_tokens == 0
    assert instance.kv_tokens == 0
    return sorted(ended, key=lambda served: served.request.number), instance, integral


def request(number: int, arrived_s: float, prompt: int, output: int, tier: str = "IW-F") -> Request:
    return Request(
        number=number, arrived_s=arrived_s, model="m", origin="r", tier=tier, prompt_tokens=prompt, output_tokens=output
    )


def poisson(count: int, rate_per_s: float, seed: int, *, prompt: int = 400, output: int = 60) -> list[Request]:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts, outputs = rng.integers(1, 2 * prompt, count), rng.integers(1, 2 * output, count)
    tiers = rng.choice(["IW-F", "IW-N", "NIW"], count, p=[0.5, 0.3, 0.2])
    rows = zip(times_s, prompts, outputs, tiers, strict=True)
    return [request(n, float(t), int(p), int(o), str(tier)) for n, (t, p, o, tier) in enumerate(rows)]


@pytest.mark.parametrize("order", ["fcfs", "edf", "pf", "dpa"])
@pytest.mark.parametrize("rate_per_s", [20.0, 200.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_same_token_times_as_the_live_engine_step_by_step(order: str, rate_per_s: float, *, mixed: bool) -> None:
    requests = poisson(70, rate_per_s, seed=3)
    turns = TurnSettings(prefill=PrefillSettings(order=order), mixed_batches=mixed)
    ended, _, _ = serve(requests, InstanceSettings(kv_bytes=10**9, batch_max=1000, turns=turns))
    live = replay(
        requests,
        ReplaySettings(profile=profile_of(LATENCY), weights_bytes=10, kv_bytes=10**9, batch_max=1000, turns=turns),
        [spec_of("m")],
        objective=TARGET,
    )
    assert len(ended) == len(requests)
    for served in ended:
        times_s = live[served.request.number]
        assert served.first_s == pytest.approx(times_s[0], abs=1e-6)
        assert served.last_s == pytest.approx(times_s[-1], abs=1e-6)
        exact = ServedRequest(
            arrived_s=served.request.arrived_s,
            token_times_s=times_s,
            tokens=len(times_s),
            ttft_s=TARGET.ttft_s,
            tbt_s=TARGET.tbt_s,
        )
        assert served.share == pytest.approx(service_share(exact), abs=1e-6)
        assert served.in_time == tokens_in_time(exact)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    rate_per_s=st.sampled_from([5.0, 50.0, 500.0]),
    kv_tokens=st.integers(1000, 6000),
    batching=st.sampled_from(["turns", "prefill-first"]),
    order=st.sampled_from(["fcfs", "dpa"]),
    mixed=st.booleans(),
)
def test_with_little_memory_every_request_ends_once_and_in_time_order(
    seed: int, rate_per_s: float, kv_tokens: int, batching: str, order: str, *, mixed: bool
) -> None:
    requests = poisson(40, rate_per_s, seed)
    own = InstanceSettings(
        kv_bytes=kv_tokens * KV_BYTES_PER_TOKEN,
        batch_max=16,
        prefill_tokens_per_step_max=256,
        batching=batching,
        turns=TurnSettings(prefill=PrefillSettings(order=order), mixed_batches=mixed),
    )
    ended, instance, _ = serve(requests, own)  # that room is never exceeded is asserted after each event
    assert [served.request.number for served in ended] == list(range(len(requests)))
    for served in ended:
        shortest_s = LATENCY.prefill_s(served.request.prompt_tokens, served.request.prompt_tokens**2)
        assert served.first_s >= served.request.arrived_s + shortest_s - 1e-9
        assert served.last_s >= served.first_s
        assert served.made == served.request.output_tokens
        assert 0 <= served.in_time <= served.made
        assert 0 <= served.share <= 1
    assert instance.busy_s <= max(served.last_s for served in ended) + 1e-9


def test_kv_that_finds_no_room_leaves_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driven_out, drive_out = [], Batch.drive_out

    def seen(batch: Batch, now_s: float) -> BatchSequence:
        driven_out.append(drive_out(batch, now_s))
        return driven_out[-1]

    monkeypatch.setattr(Batch, "drive_out", seen)
    requests = [request(n, 0.0, 100, 300) for n in range(10)]
    ended, _, _ = serve(requests, InstanceSettings(kv_bytes=1500 * KV_BYTES_PER_TOKEN))
    assert driven_out
    assert len(ended) == 10


def test_waiting_time_of_an_m_d_1_queue() -> None:
    service_s, rate_per_s, count = 0.1, 7.0, 5_000
    latency = LatencyModel(
        prefill_base_s=service_s,
        prefill_per_token_s=0.0,
        prefill_per_token2_s=0.0,
        decode_base_s=0.01,
        decode_per_context_token_s=0.0,
        decode_per_sequence_s=0.0,
    )
    times_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate_per_s, count))
    requests = [request(n, float(t), 10, 1) for n, t in enumerate(times_s)]
    one_by_one = InstanceSettings(kv_bytes=10**9, prefill_tokens_per_step_max=10, batching="prefill-first")
    ended, _, _ = serve(requests, one_by_one, latency)
    load = rate_per_s * service_s
    waited_s = fmean(served.ttft_s for served in ended) - service_s
    assert waited_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.12)


def test_littles_law() -> None:
    requests = poisson(500, 20.0, seed=5)
    ended, _, integral = serve(requests, InstanceSettings(kv_bytes=10**8))
    assert integral == pytest.approx(sum(served.service_s for served in ended), rel=1e-9)
