"""A slot that switches between more models than it holds, short of KV: who has the memory of weights, simulated.

The worker is the replay engine in simulated time, its slices by deadlines, with memory for two models. What KV does:

    swap    KV of models that wait is swapped out and in; the next model is prefetched
    auto    the same, and KV has the next model's place where the cost model says so (`engines.core.remapping.places`)
    lend    the same wherever KV is short (to compare)
    more    as swap, with the place's memory in addition: what lending could gain at most

Arrivals are Poisson, equally often of each model; lengths are lognormal. Step times, weights and KV of the models, and
the interconnects, are those of `remapping_load`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import typer

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.profile import GpuProfile, ModelProfile
from dataplane.scheduling.schedule import TurnSettings
from ops.bench.papers.remapping_load import (
    GRACE_HOPPER,
    LLAMA_2_13B,
    LLAMA_3_8B,
    PCIE_4,
    PCIE_5,
    SharedModel,
    Wire,
)
from ops.bench.shared import SimulatedClock, chosen, serve
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.faults.percentiles import percentile

Way = Literal["swap", "auto", "lend", "more"]
WAYS: tuple[Way, ...] = ("swap", "auto", "lend", "more")
SIGMA = 0.6
OBJECTIVE = Objective(ttft_s=10.0, tbt_s=0.1)
"""That of Aegaeon's evaluation."""
HOST_KV_BYTES = 2**40
CONTEXT_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True)
class SlotLoad:
    """`models` copies of `model` on a slot with `kv_bytes` for KV. `rate`: requests a second of all models, for
    `duration_s`; mean tokens of prompts and answers.
    """

    model: SharedModel
    models: int
    kv_bytes: int
    wire: Wire
    rate: float
    prompt_tokens: int
    answer_tokens: int
    duration_s: float = 120.0

    @property
    def title(self) -> str:
        sizes = f"{self.prompt_tokens}+{self.answer_tokens}"
        return f"{self.models} x {self.model.name}, {self.kv_bytes / 1e9:g} GB of KV, {sizes}, {self.rate:g}/s"


@dataclass(frozen=True, kw_only=True)
class SlotFigures:
    """`in_time_percent`: tokens made by their deadlines; `late_percent`: requests whose first token was late;
    `lent`: how often the place came to be lent.
    """

    tokens_per_s: float
    in_time_percent: float
    tbt_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    late_percent: float
    switches: float
    swapped_out: float
    lent: float


def _loads(
    model: SharedModel, kv_gb: float, wire: Wire, models: int, tokens: tuple[int, int], *rates: float
) -> list[SlotLoad]:
    return [
        SlotLoad(
            model=model,
            models=models,
            kv_bytes=round(kv_gb * 1e9),
            wire=wire,
            rate=rate,
            prompt_tokens=tokens[0],
            answer_tokens=tokens[1],
        )
        for rate in rates
    ]


CASES: Mapping[str, Sequence[SlotLoad]] = {
    "four": _loads(LLAMA_2_13B, 16, PCIE_5, 4, (1000, 300), 1.0, 2.0, 3.0, 4.0),
    "eight": _loads(LLAMA_2_13B, 16, PCIE_5, 8, (1000, 300), 2.0, 3.0),
    "grouped": [
        *_loads(LLAMA_3_8B, 8, PCIE_5, 4, (3000, 300), 2.0, 4.0),
        *_loads(LLAMA_3_8B, 30, PCIE_5, 8, (3000, 300), 6.0),
        *_loads(LLAMA_3_8B, 16, PCIE_5, 3, (6000, 400), 3.0),
    ],
    "slow-link": _loads(LLAMA_2_13B, 16, PCIE_4, 4, (1000, 300), 2.0, 4.0),
    "fast-link": _loads(LLAMA_2_13B, 16, GRACE_HOPPER, 4, (1000, 300), 1.0, 2.0, 3.0, 4.0),
}
"""Llama 2 has keys and values for each head, 0.82 MB a token; Llama 3 for groups of heads, 0.13 MB."""


def draw_requests(load: SlotLoad, seed: int) -> list[tuple[float, EngineRequest]]:
    """Requests by arrival (seconds). Equal seeds give equal requests. Each has at most nine tenths of the KV memory."""
    rng = np.random.default_rng(seed)
    most = int(0.9 * load.kv_bytes / load.model.kv_bytes_per_token)
    drawn: list[tuple[float, int, int, int]] = []
    for model in range(load.models):
        arrived_s = rng.exponential(load.models / load.rate)
        while arrived_s < load.duration_s:
            prompt, answer = (
                max(1, int(rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA)))
                for mean in (load.prompt_tokens, load.answer_tokens)
            )
            prompt = min(prompt, most // 2)
            drawn.append((arrived_s, model, prompt, min(answer, most - prompt)))
            arrived_s += rng.exponential(load.models / load.rate)
    return [(each[0], _request(number, *each[1:])) for number, each in enumerate(sorted(drawn))]


def _request(number: int, model: int, prompt_tokens: int, answer_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        instance_id=f"m{model}",
        tier=Tier.IW_N,
        objective=OBJECTIVE,
        prompt=(0,) * prompt_tokens,
        max_tokens=answer_tokens,
        ignore_eos=True,
    )


def make_slot(load: SlotLoad, way: Way, clock: SimulatedClock) -> ReplayEngine:
    """The slot with its models; none of them is loaded yet."""
    model, wire = load.model, load.wire
    pressures: Mapping[Way, KvPressure] = {"auto": "auto", "lend": "remap"}
    profile = ModelProfile(name=model.name, source="", gpus=1, weights_bytes=model.layers_bytes, latency=model.latency)
    settings = ReplaySettings(
        profile=GpuProfile(
            gpu_type=wire.name,
            memory_bytes=0,
            pcie_bytes_per_s=wire.bytes_per_s,
            transfer_efficiency=1.0,
            cost_per_hour=0.0,
            models=(profile,),
        ),
        weights_bytes=2 * model.layers_bytes,
        kv_bytes=load.kv_bytes + (model.layers_bytes if way == "more" else 0),
        host_kv_bytes=HOST_KV_BYTES,
        batch_max=256,
        kv_pressure=pressures.get(way, "swap"),
        remap=RemapSettings(capped=way != "lend", share_max=0.0 if way == "lend" else 0.9),
        layers=model.layers,
        turns=TurnSettings(time_slices="deadlines"),
    )
    engine = ReplayEngine(settings, clock, clock.sleep)
    for number in range(load.models):
        spec = ModelSpec(
            name=f"m{number}",
            path="",
            weights_bytes=model.layers_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token,
            context_tokens=CONTEXT_TOKENS,
        )
        engine.load(spec.name, spec)
    return engine


def measure(load: SlotLoad, way: Way, seed: int) -> SlotFigures:
    """Serve the requests of a load to the end."""
    clock = SimulatedClock()
    engine, requests = make_slot(load, way, clock), draw_requests(load, seed)
    arrived_s = {request.request_id: at_s for at_s, request in requests}
    made_s: dict[str, list[float]] = {request_id: [] for request_id in arrived_s}
    for _, outputs in serve(engine, clock, requests):
        for output in outputs:
            assert output.error is None, output.error
            made_s[output.request_id] += [clock.now_s] * len(output.token_ids)
    gaps_s = [later - one for times_s in made_s.values() for one, later in pairwise(times_s)]
    firsts_s = [times_s[0] - arrived_s[request_id] for request_id, times_s in made_s.items()]
    in_time = [
        at_s <= arrived_s[request_id] + OBJECTIVE.ttft_s + place * OBJECTIVE.tbt_s
        for request_id, times_s in made_s.items()
        for place, at_s in enumerate(times_s)
    ]
    return SlotFigures(
        tokens_per_s=len(in_time) / clock.now_s,
        in_time_percent=100 * fmean(in_time),
        tbt_p99_s=percentile(gaps_s, 0.99),
        ttft_p50_s=percentile(firsts_s, 0.5),
        ttft_p99_s=percentile(firsts_s, 0.99),
        late_percent=100 * fmean(first_s > OBJECTIVE.ttft_s for first_s in firsts_s),
        switches=engine.stats().switches_total,
        swapped_out=engine.kv.swapped_out_total,
        lent=engine.pressure.actions["lend"],
    )


def measured(load: SlotLoad, way: Way, seeds: Sequence[int]) -> dict[str, Any]:
    """A row: means over the seeds, and the least and most of tokens in time."""
    runs = [asdict(measure(load, way, seed)) for seed in seeds]
    in_time = [run["in_time_percent"] for run in runs]
    means = {name: fmean(run[name] for run in runs) for name in runs[0]}
    named = {"load": load.title, "wire": load.wire.name, "way": way}
    return named | means | {"in_time_low": min(in_time), "in_time_high": max(in_time)}


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all if not given.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; all if not given.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Only loads of this many requests a second.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Draws of each load, from seed 1 on.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare who has the memory of weights on a slot that switches.

    \b
    Examples:
      python -m ops.bench.papers.remapping_slots
      python -m ops.bench.papers.remapping_slots --case fast-link --way swap --way auto --rate 4 --json
    """
    names, ways = chosen(case, CASES, "--case"), chosen(way, WAYS, "--way")
    rows = []
    for name in names:
        notes().print(name)
        for load in (load for load in CASES[name] if not rate or load.rate in rate):
            rows += [{"case": name} | measured(load, each, range(1, seeds + 1)) for each in ways]
    if as_json:
        print_json({"runs": rows})
        return
    print_table(f"Means of {seeds} draws", COLUMNS, rows)


COLUMNS: Columns = {
    "load": "load",
    "wire": "wire",
    "way": "way",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "in time %": lambda row: f"{row['in_time_percent']:.1f} ({row['in_time_low']:.0f} to {row['in_time_high']:.0f})",
    "TBT p99 ms": lambda row: f"{1000 * row['tbt_p99_s']:.0f}",
    "TTFT p50/p99 s": lambda row: f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.1f}",
    "late firsts %": lambda row: f"{row['late_percent']:.1f}",
    "switches": lambda row: f"{row['switches']:.0f}",
    "swapped out": lambda row: f"{row['swapped_out']:.0f}",
    "lent": lambda row: f"{row['lent']:.1f}",
}


if __name__ == "__main__":
    typer.run(main)
