"""How well one slot serves many models: a replay in simulated time, against what its turn policy predicts.

Requests arrive for each model by a Poisson process of its own. The slot decodes only (requests come with their KV, as
from a prefill slot), or prefills as well.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataplane.engine import EngineRequest, KvHandle
from dataplane.engines.replay import ReplayEngine, ReplaySettings
from dataplane.engines.replay_requests import REPLAY_KV_FILE
from dataplane.messages import ModelSpec, Tier
from dataplane.profile import GpuProfile
from dataplane.turns.attainment import ServedRequest, service_attainment, token_attainment
from dataplane.turns.schedule import TurnSettings
from dataplane.turns.tiers import TIER_TARGETS

PROFILE = Path(__file__).parents[1] / "profiles" / "h800.toml"
WEIGHTS_BYTES = 58 * 10**9
KV_BYTES = 20 * 10**9
SMALLEST_BYTES, LARGEST_BYTES = 12 * 10**9, 28 * 10**9
KV_BYTES_PER_TOKEN = 2**17


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """What is asked of the slot. `rate_per_s` is that of each model. Lengths are lognormal around their medians."""

    rate_per_s: float
    seed: int
    models: int = 20
    duration_s: float = 200.0
    tier: Tier = "IW-F"
    prompt_tokens_median: float = 120.0
    output_tokens_median: float = 150.0
    decode_only: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """What came of a load. `predicted`: by the policy, min(1, 1 / alpha) over the time of each request."""

    load: PoolLoad
    alpha_mean: float
    predicted: float
    service_attainment: float
    token_attainment: float
    requests: int
    tokens: int
    switches: int
    busy_share: float


class _Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


@dataclass(kw_only=True)
class _Flight:
    """A request on its way. `promised_s`: the time that it was there for, weighted by the predicted attainment."""

    request: EngineRequest
    arrived_s: float
    token_times_s: list[float] = field(default_factory=list)
    promised_before_s: float = 0.0
    promised_s: float = 0.0


def measure_pool(
    load: PoolLoad, *, profile: GpuProfile, turns: TurnSettings | None = None, prefetch: bool = True
) -> PoolFigures:
    """Serve a load to its end."""
    time = _Time()
    settings = ReplaySettings(
        profile=profile,
        weights_bytes=WEIGHTS_BYTES,
        kv_bytes=KV_BYTES,
        prefetch=prefetch,
        turns=turns or TurnSettings(),
    )
    engine = ReplayEngine(settings, time, time.sleep)
    for index, model in enumerate(_models(load.models)):
        engine.load(f"instance-{index}", model)
    arrivals = deque(_arrivals(load))
    flights: dict[str, _Flight] = {}
    promised_s = alpha_s = busy_s = 0.0
    while arrivals or engine.has_work():
        if not engine.has_work():
            time.now_s = max(time.now_s, arrivals[0].arrived_s)
        while arrivals and arrivals[0].arrived_s <= time.now_s:
            flight = arrivals.popleft()
            flight.promised_before_s = promised_s
            flights[flight.request.request_id] = flight
            engine.add(flight.request)
        began_s = time.now_s
        outputs = engine.step()
        took_s = time.now_s - began_s
        alpha = engine._state.round.alpha
        promised_s += took_s * min(1.0, 1.0 / alpha if alpha else 1.0)
        alpha_s += took_s * alpha
        busy_s += took_s
        for output in outputs:
            flight = flights[output.request_id]
            flight.token_times_s += [time.now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                flight.promised_s = promised_s - flight.promised_before_s
    return _figures(load, engine, list(flights.values()), alpha_s / busy_s, busy_s / time.now_s)


def _figures(
    load: PoolLoad, engine: ReplayEngine, flights: list[_Flight], alpha_mean: float, busy_share: float
) -> PoolFigures:
    target = TIER_TARGETS[load.tier]
    served = [
        ServedRequest(
            arrived_s=flight.arrived_s,
            token_times_s=flight.token_times_s,
            tokens=flight.request.max_tokens - len(flight.request.generated),
            ttft_s=target.ttft_s,
            tbt_s=target.tbt_s,
        )
        for flight in flights
    ]
    stats = engine.stats()
    return PoolFigures(
        load=load,
        alpha_mean=alpha_mean,
        predicted=sum(f.promised_s / (f.token_times_s[-1] - f.arrived_s) for f in flights) / len(flights),
        service_attainment=service_attainment(served),
        token_attainment=token_attainment(served),
        requests=len(flights),
        tokens=stats.tokens_total,
        switches=stats.switches_total,
        busy_share=busy_share,
    )


def _models(count: int) -> list[ModelSpec]:
    """Models of sizes from the smallest to the largest, evenly spaced."""
    return [
        ModelSpec(
            name=f"model-{index}",
            path="-",
            weights_bytes=int(weights_bytes),
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            context_tokens=8192,
        )
        for index, weights_bytes in enumerate(np.linspace(SMALLEST_BYTES, LARGEST_BYTES, count))
    ]


def _arrivals(load: PoolLoad) -> list[_Flight]:
    """All requests, in order of arrival."""
    rng = np.random.default_rng(load.seed)
    flights = []
    for model in range(load.models):
        count = rng.poisson(load.rate_per_s * load.duration_s)
        for number, arrived_s in enumerate(rng.uniform(0, load.duration_s, count)):
            prompt_tokens = int(np.clip(rng.lognormal(np.log(load.prompt_tokens_median), 1.0), 4, 2048))
            output_tokens = int(np.clip(rng.lognormal(np.log(load.output_tokens_median), 0.8), 8, 1024))
            request = EngineRequest(
                request_id=f"{model}-{number}",
                instance_id=f"instance-{model}",
                tier=load.tier,
                prompt=(0,) * prompt_tokens,
                generated=(0,) if load.decode_only else (),
                max_tokens=output_tokens,
                kv=_prefilled(prompt_tokens) if load.decode_only else None,
            )
            flights.append(_Flight(request=request, arrived_s=float(arrived_s)))
    return sorted(flights, key=lambda flight: flight.arrived_s)


def _prefilled(tokens: int) -> KvHandle:
    return KvHandle(file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=tokens)
