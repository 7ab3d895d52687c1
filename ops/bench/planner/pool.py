"""Attainment of many models on one worker, against its prediction: `python -m ops.bench.planner.pool --help`.

The replay engine in simulated time, with Poisson arrivals for each model. The worker only decodes (requests arrive with
their KV, as from a prefill worker), or prefills as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer

from dataplane.engines.interface import EngineRequest, EngineStats, KvHandle
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.kv import REPLAY_KV_FILE
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.attainment import ServedRequest, service_attainment, token_attainment
from dataplane.scheduling.profile import GpuProfile, load_gpu_profile
from dataplane.scheduling.schedule import TurnSettings
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.bench.shared import SimulatedClock, serve
from ops.client.screen import AsJson, Columns, print_json, print_table

PROFILE = Path(__file__).parents[2] / "profiles" / "h800.toml"
WEIGHTS_BYTES = 58 * 10**9
KV_BYTES = 20 * 10**9
SMALLEST_BYTES, LARGEST_BYTES = 12 * 10**9, 28 * 10**9
KV_BYTES_PER_TOKEN = 2**17
COLUMNS: Columns = {
    "slot": "slot",
    "requests/s per model": "rate_per_s",
    "load": lambda row: f"{row['alpha']:.2f}",
    "predicted": lambda row: f"{row['predicted']:.3f}",
    "kept": lambda row: f"{row['kept']:.3f}",
    "service": lambda row: f"{row['service']:.3f}",
}

app = typer.Typer(help=(__doc__ or "").partition(": `")[0] + ".", add_completion=False)
Rates = Annotated[list[float] | None, typer.Option("--rate", min=0.001, help="Requests/s of each of 20 models.")]
Tbt = Annotated[float, typer.Option(min=0.001, max=3600, help="Promised between tokens, in seconds.")]


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """The requests. `rate_per_s`: of each model. Lengths are lognormal around their medians."""

    rate_per_s: float
    seed: int
    models: int = 20
    duration_s: float = 200.0
    tier: Tier = Tier.IW_F
    objective: Objective | None = None
    prompt_tokens_median: float = 120.0
    output_tokens_median: float = 150.0
    decode_only: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """Figures of a load.

    Attributes:
        alpha: the mean load that the engine reports, which is of the batches in its scheduling round.
        predicted: the mean of min(1, 1 / alpha) from the first token of each request here to its last.
        kept: the share of that time in which no token was overdue; a late token delays the deadlines after it.
        wait_s: mean time from arrival to the first token here.
        service, token: attainment of whole requests, that wait included.
    """

    load: PoolLoad
    alpha: float
    predicted: float
    kept: float
    wait_s: float
    service: float
    token: float
    requests: int
    tokens: int
    switches: int


@dataclass(kw_only=True)
class _Inflight:
    """A request in flight. `promises_s`: the integral of the predicted attainment at the time of each token."""

    request: EngineRequest
    arrived_s: float
    token_times_s: list[float] = field(default_factory=list)
    promises_s: list[float] = field(default_factory=list)

    def served(self, *, from_first_token: bool) -> ServedRequest:
        promise = self.request.promise
        return ServedRequest(
            arrived_s=self.token_times_s[0] if from_first_token else self.arrived_s,
            token_times_s=self.token_times_s,
            tokens=self.request.max_tokens - len(self.request.generated),
            ttft_s=0.0 if from_first_token else promise.ttft_s,
            tbt_s=promise.tbt_s,
        )

    @property
    def predicted(self) -> float:
        time_s = self.token_times_s[-1] - self.token_times_s[0]
        return (self.promises_s[-1] - self.promises_s[0]) / time_s if time_s else 1.0


def measure_pool(
    load: PoolLoad, *, profile: GpuProfile, turns: TurnSettings | None = None, prefetch: bool = True
) -> PoolFigures:
    """Serve a load to its end in simulated time."""
    clock = SimulatedClock()
    settings = ReplaySettings(
        profile=profile,
        weights_bytes=WEIGHTS_BYTES,
        kv_bytes=KV_BYTES,
        prefetch=prefetch,
        turns=turns or TurnSettings(),
    )
    engine = ReplayEngine(settings, clock, clock.sleep)
    for index, model in enumerate(_models(load.models)):
        engine.load(f"instance-{index}", model)
    in_flight = {one.request.request_id: one for one in _arrivals(load)}
    promise_s = alpha_s = busy_s = 0.0
    for began_s, outputs in serve(engine, clock, ((one.arrived_s, one.request) for one in in_flight.values())):
        took_s = clock.now_s - began_s
        promise_s += took_s / max(1.0, engine.load_alpha)
        alpha_s += took_s * engine.load_alpha
        busy_s += took_s
        for output in outputs:
            inflight = in_flight[output.request_id]
            inflight.token_times_s += [clock.now_s] * len(output.token_ids)
            inflight.promises_s += [promise_s] * len(output.token_ids)
    return _figures(load, engine.stats(), list(in_flight.values()), alpha_s / busy_s)


def _figures(load: PoolLoad, stats: EngineStats, in_flight: list[_Inflight], alpha: float) -> PoolFigures:
    whole = [inflight.served(from_first_token=False) for inflight in in_flight]
    return PoolFigures(
        load=load,
        alpha=alpha,
        predicted=fmean(inflight.predicted for inflight in in_flight),
        kept=service_attainment([inflight.served(from_first_token=True) for inflight in in_flight]),
        wait_s=fmean(inflight.token_times_s[0] - inflight.arrived_s for inflight in in_flight),
        service=service_attainment(whole),
        token=token_attainment(whole),
        requests=len(in_flight),
        tokens=stats.tokens_total,
        switches=stats.switches_total,
    )


def _models(count: int) -> list[ModelSpec]:
    """Models with evenly spaced sizes."""
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


def _arrivals(load: PoolLoad) -> list[_Inflight]:
    rng = np.random.default_rng(load.seed)
    in_flight = []
    for model in range(load.models):
        count = rng.poisson(load.rate_per_s * load.duration_s)
        for number, arrived_s in enumerate(rng.uniform(0, load.duration_s, count)):
            prompt_tokens = int(np.clip(rng.lognormal(np.log(load.prompt_tokens_median), 1.0), 4, 2048))
            output_tokens = int(np.clip(rng.lognormal(np.log(load.output_tokens_median), 0.8), 8, 1024))
            request = EngineRequest(
                request_id=f"{model}-{number}",
                instance_id=f"instance-{model}",
                tier=load.tier,
                objective=load.objective,
                prompt=(0,) * prompt_tokens,
                generated=(0,) if load.decode_only else (),
                max_tokens=output_tokens,
                kv=_prefilled(prompt_tokens) if load.decode_only else None,
            )
            in_flight.append(_Inflight(request=request, arrived_s=float(arrived_s)))
    return sorted(in_flight, key=lambda inflight: inflight.arrived_s)


def _prefilled(tokens: int) -> KvHandle:
    return KvHandle(file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=tokens)


@app.command()
def table(
    rate: Rates = None,
    tbt_s: Tbt = TIER_OBJECTIVES[Tier.IW_F].tbt_s,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each load, from seed 1 on.")] = 6,
    duration_s: Annotated[float, typer.Option(min=1, help="How long requests come, in simulated seconds.")] = 100.0,
    as_json: AsJson = False,
) -> None:
    """20 models on one worker that decodes, and on one that prefills as well."""
    profile = load_gpu_profile(PROFILE)
    rows = []
    for decode_only in (True, False):
        for rate_per_s in rate or (0.008, 0.016, 0.03, 0.045):
            load = PoolLoad(
                rate_per_s=rate_per_s,
                seed=0,
                duration_s=duration_s,
                objective=Objective(ttft_s=TIER_OBJECTIVES[Tier.IW_F].ttft_s, tbt_s=tbt_s),
                decode_only=decode_only,
            )
            figures = [measure_pool(replace(load, seed=seed), profile=profile) for seed in range(1, seeds + 1)]
            means = {name: over_requests(figures, name) for name in ("alpha", "predicted", "kept", "service")}
            slot = "decodes" if decode_only else "both"
            rows.append({"slot": slot, "rate_per_s": rate_per_s, "tbt_s": tbt_s, **means})
    if as_json:
        print_json(rows)
    else:
        print_table(f"20 models on a slot, a token each {tbt_s:g} s", COLUMNS, rows)


def over_requests(figures: Sequence[PoolFigures], name: str) -> float:
    """A mean over all requests of several runs."""
    return float(sum(getattr(one, name) * one.requests for one in figures) / sum(one.requests for one in figures))


if __name__ == "__main__":
    app()
